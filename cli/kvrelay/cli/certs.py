"""`kvrelay certs`: a CA of your own with certificates for a fleet and its clients, for trying out and for tests.

Keys lie unencrypted in the folder. A fleet that others depend on takes its certificates from wherever its organisation
keeps them; a member's must carry the name that `kvrelay.proto.tls.MEMBER` says.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

from kvrelay.core.errors import SettingsError
from kvrelay.proto.tls import MEMBER

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def run(options: argparse.Namespace) -> int:
    """Write ca, member and client certificates with their keys into a folder."""
    folder = Path(options.folder)
    make(folder, days=options.days)
    print(f"{folder}: ca.pem for everybody, member.pem and .key for routers and nodes, client.pem and .key for clients")
    return 0


def make(folder: Path, *, days: int) -> None:
    """Make the files; an existing CA is refused, since all certificates that it signed would be worthless.

    Raises:
        SettingsError: there is a CA already, or no openssl program.
    """
    if (folder / "ca.pem").exists():
        raise SettingsError(f"{folder} holds a CA already")
    if shutil.which("openssl") is None:
        raise SettingsError("kvrelay certs needs the openssl program")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    ca, ca_key, lifetime = str(folder / "ca.pem"), str(folder / "ca.key"), ("-days", str(days))
    _openssl("req", "-x509", *_CURVE, "-subj", "/CN=kvrelay CA", *lifetime, "-keyout", ca_key, "-out", ca)
    for name, alternative in (("member", MEMBER), ("client", "kvrelay-client")):
        request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
        key = str(folder / f"{name}.key")
        _openssl("req", *_CURVE, "-subj", f"/CN={alternative}", "-keyout", key, "-out", str(request))
        extensions.write_text(f"subjectAltName=DNS:{alternative}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl(
            "x509", "-req", "-in", str(request), "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", *lifetime,
            "-extfile", str(extensions), "-out", str(folder / f"{name}.pem"),
        )  # fmt: skip
        request.unlink()
        extensions.unlink()


def _openssl(*words: str) -> None:
    done = subprocess.run(["openssl", *words], capture_output=True, text=True, check=False)  # noqa: S603, S607 - ours
    if done.returncode != 0:
        raise SettingsError(f"openssl {words[0]}: {done.stderr.strip()}")
