"""Who a command says it is: credentials out of the options for TLS and tokens."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import grpc

from kvrelay.core.errors import SettingsError
from kvrelay.core.text_file import read_text
from kvrelay.proto.tls import Tls


@dataclass(frozen=True, slots=True)
class Identity:
    tls: Tls
    token: str = field(default="", repr=False)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Identity | None:
        """Return what the options say; nothing for plain text.

        Raises:
            SettingsError: a file cannot be read, or a token would travel in plain text.
        """
        tls = Tls.load(ca=options.tls_ca, cert=options.tls_cert, key=options.tls_key)
        if tls is None:
            if options.token_file:
                raise SettingsError("--token-file needs --tls-ca: without TLS tokens travel in plain text")
            return None
        return cls(tls, read_text(options.token_file, SettingsError).strip() if options.token_file else "")

    def credentials(self) -> grpc.ChannelCredentials:
        channel = self.tls.channel_credentials()
        if not self.token:
            return channel
        return grpc.composite_channel_credentials(channel, grpc.access_token_call_credentials(self.token))
