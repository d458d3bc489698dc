"""Mutual TLS between the parties of a fleet, and who is a member of it.

One private CA signs everybody. Members carry the name MEMBER in their certificates, whatever their addresses are, and
that name is what both sides of a call check: nodes come and go, and their addresses with them. Clients' certificates do
not carry it, so a client can talk to routers only.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvrelay.core.errors import SettingsError

MEMBER = "kvrelay-member"
_NAMES = "x509_subject_alternative_name"


@dataclass(frozen=True, slots=True)
class Tls:
    """One party's certificate, its key, and the CA that it trusts; PEM."""

    ca: bytes = field(repr=False)
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)

    @classmethod
    def load(cls, *, ca: str, cert: str = "", key: str = "") -> Tls | None:
        """Read the files; nothing when no CA is named: then everything is plain text.

        Raises:
            SettingsError: a file cannot be read or is not PEM, or a certificate comes without its key.
        """
        if not ca:
            if cert or key:
                raise SettingsError("a TLS certificate or key is set but no CA")
            return None
        if bool(cert) != bool(key):
            raise SettingsError("a TLS certificate needs its key and the other way round")
        tls = cls(_read(ca), _read(cert) if cert else None, _read(key) if key else None)
        _check(ca, cert, key)
        return tls

    def server_credentials(
        self, *, require_client_cert: bool = True, on_handshake: Callable[[], None] = lambda: None
    ) -> grpc.ServerCredentials:
        """Return credentials to serve with.

        Args:
            on_handshake: called at the begin of each handshake, on a thread of gRPC's.

        Raises:
            SettingsError: there is no certificate to show.
        """
        if self.cert is None or self.key is None:
            raise SettingsError("a server with TLS needs a certificate and its key")
        certificate = grpc.ssl_server_certificate_configuration([(self.key, self.cert)], root_certificates=self.ca)

        def same_certificate() -> grpc.ServerCertificateConfiguration:
            on_handshake()
            return certificate

        return grpc.dynamic_ssl_server_credentials(certificate, same_certificate, require_client_cert)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


# What makes a channel check the member's name instead of the address it connects to.
CHANNEL_OPTIONS: Sequence[tuple[str, str]] = (("grpc.ssl_target_name_override", MEMBER),)


def is_member(auth_context: Mapping[str, Iterable[bytes]]) -> bool:
    """Return whether a call's peer has shown a member's certificate."""
    return MEMBER.encode() in auth_context.get(_NAMES, ())


def has_certificate(auth_context: Mapping[str, Iterable[bytes]]) -> bool:
    return bool(auth_context.get("x509_pem_cert"))


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as err:
        raise SettingsError(f"cannot read {path}: {err.strerror}") from err


def _check(ca: str, cert: str, key: str) -> None:
    """Refuse what gRPC would only report as a port that cannot be bound, or as a server that cannot be reached.

    Raises:
        SettingsError: a file holds no certificate or key, or the key is not the certificate's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # how strong keys must be is not decided here
    try:
        context.load_verify_locations(cafile=ca)
    except ssl.SSLError as err:
        raise SettingsError(f"{ca} holds no CA certificate in PEM: {err}") from err
    if not cert:
        return
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # without it an encrypted key would ask the terminal
    except ssl.SSLError as err:
        raise SettingsError(f"{cert} and {key} are no certificate with its unencrypted key, in PEM: {err}") from err
