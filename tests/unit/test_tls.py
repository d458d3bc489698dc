"""Files that make no TLS are refused by name, before anything listens or connects."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvrelay.cli import certs
from kvrelay.core.errors import SettingsError
from kvrelay.proto.tls import Tls


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tls")
    certs.make(made, days=1)
    (made / "text.pem").write_text("no certificate\n")
    locked = ["openssl", "pkey", "-in", "member.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key"]
    subprocess.run(locked, cwd=made, check=True, capture_output=True)
    return made


def loaded(folder: Path, ca: str, cert: str = "", key: str = "") -> Tls | None:
    return Tls.load(ca=str(folder / ca), cert=cert and str(folder / cert), key=key and str(folder / key))


def test_what_certs_makes_is_taken(folder: Path) -> None:
    for name in ("member", "client"):
        assert loaded(folder, "ca.pem", f"{name}.pem", f"{name}.key") is not None
    assert loaded(folder, "ca.pem") is not None


@pytest.mark.parametrize("ca", ["text.pem", "ca.key"])
def test_a_ca_file_without_a_certificate_is_named(folder: Path, ca: str) -> None:
    with pytest.raises(SettingsError, match=f"{ca} holds no CA certificate"):
        loaded(folder, ca)


@pytest.mark.parametrize(
    ("cert", "key"),
    [
        ("member.pem", "client.key"), ("member.key", "member.pem"), ("text.pem", "member.key"),
        ("member.pem", "text.pem"), ("member.pem", "locked.key"),
    ],
    ids=["of another", "swapped", "no certificate", "no key", "encrypted"],
)  # fmt: skip
def test_a_certificate_without_its_key_is_named(folder: Path, cert: str, key: str) -> None:
    with pytest.raises(SettingsError, match=f"{cert} and .*{key} are no certificate with its unencrypted key"):
        loaded(folder, "ca.pem", cert, key)
