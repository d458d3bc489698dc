"""The compose files' secure mode: TLS between all containers, tokens for clients."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cluster.cluster import Client, status_of
from compose.conftest import environment
from compose.containers import FILE, PATIENT, Containers, containers
from kvrelay.cli import certs, client
from kvrelay.cli.identity import Identity
from kvrelay.proto.tls import Tls
from operations.deployment import MODEL
from oracle_data import recording
from repo import ROOT

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]
TOLD = recording(MODEL, 333)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of certificates and tokens that the containers' user can read."""
    made = tmp_path_factory.mktemp("certs") / "made"
    certs.make(made, days=1)
    digest = hashlib.sha256(b"token-ops").hexdigest()
    (made / "tokens.json").write_text(json.dumps([{"tenant": "ops", "token_sha256": digest, "operator": True}]))
    for path in (made, *made.iterdir()):
        path.chmod(0o755)
    return made


@pytest.fixture(scope="module")
def secure(images: None, folder: Path) -> Iterator[Containers]:
    tls = Tls.load(ca=str(folder / "ca.pem"), cert=str(folder / "member.pem"), key=str(folder / "member.key"))
    assert tls is not None
    identity = Identity(tls, "token-ops")

    def dial(endpoint: str, *, watch_health: bool = False) -> grpc.Channel:
        return client.connect(endpoint, identity, watch_health=watch_health)

    files = (FILE, ROOT / "compose" / "secure.yml", PATIENT)
    with containers({**environment(), "KVRELAY_CERTS": str(folder)}, files=files, dial=dial) as started:
        yield started


def test_a_known_token_is_answered(secure: Containers) -> None:
    assert secure.client.generate(TOLD.prompt, max_tokens=24).token_ids == TOLD.greedy
    secure.client.assert_settled()


@pytest.mark.parametrize("token", [None, "token-wrong"])
def test_plain_text_and_a_wrong_token_are_refused(secure: Containers, folder: Path, token: str | None) -> None:
    tls = Tls.load(ca=str(folder / "ca.pem"))
    assert tls is not None
    identity = None if token is None else Identity(tls, token)
    with client.connect(secure.routers(), identity) as channel, pytest.raises(grpc.RpcError) as failed:
        Client(channel).generate(TOLD.prompt, max_tokens=4, timeout_s=10)

    expected = grpc.StatusCode.UNAVAILABLE if token is None else grpc.StatusCode.UNAUTHENTICATED
    assert status_of(failed.value)[0] is expected
