"""A fleet with mutual TLS and tokens: members and known clients are served, everybody else is refused and counted."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest

from cluster.cluster import Client, status_of, wait_until
from kvrelay.cli import certs, client
from kvrelay.cli.identity import Identity
from kvrelay.proto.handshakes import SETTLE_S
from kvrelay.proto.tls import Tls
from kvrelay.proto.v1 import common_pb2, decode_pb2_grpc
from operations.deployment import MODEL
from operations.processes import Processes, processes
from oracle_data import oracle_folder, recording

pytestmark = pytest.mark.timeout(180)
NODE = ("--pool-pages", "256", "--max-model-len", "2048", "--dtype", "float32")
METRICS = ("--metrics-listen", "127.0.0.1:0")
CHANNEL_S = 10.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """A secure deployment, the folder of its certificates, and that of its logs."""

    deployment: Processes
    certs: Path
    logs: Path

    def identity(self, name: str, token: str = "") -> Identity:
        """Return who shows a certificate of ours, or none for an empty name, and a token."""
        pair = {"cert": str(self.certs / f"{name}.pem"), "key": str(self.certs / f"{name}.key")} if name else {}
        tls = Tls.load(ca=str(self.certs / "ca.pem"), **pair)
        assert tls is not None
        return Identity(tls, token)

    def router(self) -> str:
        return self.deployment.address(self.deployment.members("router")[0])

    def decode(self) -> str:
        return self.deployment.address(self.deployment.members("decode")[0])

    def log_of(self, role: str) -> str:
        return (self.logs / f"{role}-0.log").read_text()


def token_file(folder: Path) -> Path:
    entries = [
        {"tenant": tenant, "token_sha256": hashlib.sha256(token.encode()).hexdigest(), "operator": tenant == "ops"}
        for tenant, token in (("one", "token-one"), ("two", "token-two"), ("ops", "token-ops"))
    ]
    path = folder / "tokens.json"
    path.write_text(json.dumps(entries))
    return path


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder, logs = tmp_path_factory.mktemp("certs"), tmp_path_factory.mktemp("logs")
    certs.make(folder, days=1)
    pair = ("--tls-ca", f"{folder}/ca.pem", "--tls-cert", f"{folder}/member.pem", "--tls-key", f"{folder}/member.key")
    options = {
        "router": (*pair, *METRICS, "--token-file", str(token_file(folder)), "--no-require-client-cert"),
        "prefill": (*pair, *NODE),
        "decode": (*pair, *NODE),
    }
    tls = Tls.load(ca=pair[1], cert=pair[3], key=pair[5])
    assert tls is not None

    def dial(endpoint: str, *, watch_health: bool = False) -> grpc.Channel:
        return client.connect(endpoint, Identity(tls, "token-ops"), watch_health=watch_health)

    with processes(oracle_folder(MODEL), logs, options, dial=dial) as deployment:
        yield Fleet(deployment, folder, logs)


def ask(fleet: Fleet, identity: Identity | None) -> list[int]:
    told = recording(MODEL, 333)
    with client.connect(fleet.router(), identity) as channel:
        return Client(channel).generate(told.prompt, max_tokens=24, timeout_s=CHANNEL_S).token_ids


def refused(fleet: Fleet, identity: Identity | None) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as failed:
        ask(fleet, identity)
    return status_of(failed.value)


def failed_handshakes(fleet: Fleet) -> float:
    found = re.search(r'kvrelay_refused_calls_total{reason="handshake"} (\S+)', router_metrics(fleet))
    return float(found[1]) if found else 0.0


def router_metrics(fleet: Fleet) -> str:
    address = fleet.deployment.metrics(fleet.deployment.members("router")[0])
    with urlopen(f"http://{address}/metrics") as answer:
        text: str = answer.read().decode()
    return text


def test_a_known_token_is_served_over_tls(fleet: Fleet) -> None:
    assert ask(fleet, fleet.identity("", "token-one")) == recording(MODEL, 333).greedy


def test_a_plain_text_client_is_refused_counted_and_logged_once(fleet: Fleet) -> None:
    before = failed_handshakes(fleet)
    for _ in range(3):
        assert refused(fleet, None)[0] is grpc.StatusCode.UNAVAILABLE

    wait_until(lambda: failed_handshakes(fleet) >= before + 3, 2 * SETTLE_S, lambda: str(failed_handshakes(fleet)))
    assert fleet.log_of("router").count("no call came") == 1


def test_a_certificate_of_another_ca_is_refused_and_counted(fleet: Fleet, tmp_path: Path) -> None:
    def count() -> float:
        return fleet.deployment.client.counter("calls_refused_handshake_total", role="decode")

    before = count()
    certs.make(tmp_path / "other", days=1)
    stranger = Tls(
        (fleet.certs / "ca.pem").read_bytes(),
        (tmp_path / "other" / "member.pem").read_bytes(),
        (tmp_path / "other" / "member.key").read_bytes(),
    )
    with client.connect(fleet.decode(), Identity(stranger)) as channel, pytest.raises(grpc.RpcError) as failed:
        decode_pb2_grpc.DecodeNodeStub(channel).Stats(common_pb2.StatsRequest(), timeout=CHANNEL_S)

    assert status_of(failed.value)[0] is grpc.StatusCode.UNAVAILABLE
    wait_until(lambda: count() > before, 2 * SETTLE_S, lambda: str(count()))
    assert fleet.log_of("decode").count("no call came") == 1


def test_a_server_of_another_ca_is_not_trusted(fleet: Fleet, tmp_path: Path) -> None:
    certs.make(tmp_path / "other", days=1)
    trusting = Tls.load(ca=str(tmp_path / "other" / "ca.pem"))
    assert trusting is not None

    assert refused(fleet, Identity(trusting, "token-one"))[0] is grpc.StatusCode.UNAVAILABLE


def test_wrong_and_missing_tokens_are_refused_counted_and_logged_once(fleet: Fleet) -> None:
    for _ in range(3):
        assert refused(fleet, fleet.identity("", "token-wrong"))[0] is grpc.StatusCode.UNAUTHENTICATED
    assert refused(fleet, fleet.identity(""))[0] is grpc.StatusCode.UNAUTHENTICATED

    metrics = router_metrics(fleet)
    assert 'kvrelay_refused_calls_total{reason="token"} 3.0' in metrics
    assert 'kvrelay_refused_calls_total{reason="no_token"} 1.0' in metrics
    log = fleet.log_of("router")
    assert log.count("the bearer token is not known") == 1
    assert "token-wrong" not in log
    assert "token-one" not in log


def test_a_clients_certificate_opens_no_node(fleet: Fleet) -> None:
    for _ in range(2):
        with (
            client.connect(fleet.decode(), fleet.identity("client")) as channel,
            pytest.raises(grpc.RpcError) as failed,
        ):
            decode_pb2_grpc.DecodeNodeStub(channel).Stats(common_pb2.StatsRequest(), timeout=CHANNEL_S)
        assert status_of(failed.value)[0] is grpc.StatusCode.PERMISSION_DENIED

    assert fleet.deployment.client.counter("calls_refused_certificate_total", role="decode") == 2
    assert fleet.log_of("decode").count("only members of the fleet") == 1


def test_a_tenant_that_is_no_operator_cannot_look_at_the_fleet(fleet: Fleet) -> None:
    identity = fleet.identity("", "token-one")
    with client.connect(fleet.router(), identity) as channel, pytest.raises(grpc.RpcError) as failed:
        Client(channel).nodes()
    assert status_of(failed.value)[0] is grpc.StatusCode.PERMISSION_DENIED


def test_tenants_do_not_share_cached_prefixes(fleet: Fleet) -> None:
    prompt = [11, *recording(MODEL, 333).prompt]
    used = []
    for token in ("token-one", "token-one", "token-two", "token-two"):
        with client.connect(fleet.router(), fleet.identity("", token)) as channel:
            usage = Client(channel).generate(prompt, max_tokens=4).usage
        used.append((usage.cached_tokens, usage.resident_tokens))

    assert used[0] == used[2] == (0, 0)
    assert used[1] == used[3]
    assert used[1][0] == 320


def test_nothing_is_held_after_all_this(fleet: Fleet) -> None:
    fleet.deployment.client.assert_settled()
