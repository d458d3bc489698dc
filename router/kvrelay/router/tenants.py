"""Who a client is: bearer tokens, one or more per tenant, and what a tenant may do.

The file is JSON, a list of {"tenant": NAME, "token_sha256": HEX, "operator": false, "max_requests": 0,
"tokens_per_minute": 0, "weight": 1.0}; all but the first two may be left out. It holds no token, only digests, and is
read once. A tenant with several tokens has one quota, that of its last entry. A tenant's salt comes from its name here
on the server, so nobody can ask for another's prefixes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from kvrelay.core.errors import SettingsError
from kvrelay.core.text_file import read_text
from kvrelay.proto import tls
from kvrelay.proto.gate import Refusal

_SCHEME = "Bearer "
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may have of this router; 0 = no limit."""

    max_requests: int = 0  # in work at a time
    tokens_per_minute: int = 0  # of prompts and answers together
    weight: float = 1.0  # its share when others wait too, over theirs


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    operator: bool = False  # may also list and drain nodes
    quota: Quota = Quota()

    @property
    def salt(self) -> bytes:
        """What makes this tenant's prefixes its own; empty for the only tenant of a router without tokens."""
        return hashlib.sha256(b"kvrelay tenant\0" + self.name.encode()).digest()[:16] if self.name else b""


# The tenant of the call that the current task serves.
calling: ContextVar[Tenant] = ContextVar("calling", default=Tenant(""))  # noqa: B039 - frozen


class Tokens:
    """Tenants by the digest of a token."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self._tenants = dict(tenants)

    @classmethod
    def load(cls, path: str) -> Tokens | None:
        """Read a token file; nothing for an empty path.

        Raises:
            SettingsError: it is missing or is not what it should be.
        """
        if not path:
            return None
        try:
            entries = json.loads(read_text(path, SettingsError))
            quotas = {str(entry["tenant"]): _quota(entry) for entry in entries}
            return cls({_digest(entry): _tenant(entry, quotas) for entry in entries})
        except (ValueError, TypeError, KeyError, AttributeError) as err:
            raise SettingsError(f"token file {path}: {err!r}") from err

    @property
    def num_tenants(self) -> int:
        return len({tenant.name for tenant in self._tenants.values()})

    def tenant_of(self, token: str) -> Tenant | None:
        return self._tenants.get(hashlib.sha256(token.encode()).hexdigest())


class ClientCheck:
    """The router's check of a call: its token when there are tokens, else its certificate. A `gate.Check`."""

    def __init__(self, tokens: Tokens | None) -> None:
        self._tokens = tokens

    def __call__(self, method: str, context: aio.ServicerContext[Any, Any]) -> Refusal | None:
        if self._tokens is None:
            if tls.has_certificate(context.auth_context()):
                return None
            return Refusal("certificate", grpc.StatusCode.UNAUTHENTICATED, "a client certificate is needed")
        metadata = dict(context.invocation_metadata() or ())
        value = metadata.get("authorization", "")
        if not isinstance(value, str) or not value.startswith(_SCHEME):
            return Refusal("no_token", grpc.StatusCode.UNAUTHENTICATED, "a bearer token is needed")
        tenant = self._tokens.tenant_of(value.removeprefix(_SCHEME))
        if tenant is None:
            return Refusal("token", grpc.StatusCode.UNAUTHENTICATED, "the bearer token is not known")
        if method.startswith("/kvrelay.v1.Fleet/") and not tenant.operator:
            return Refusal("operator", grpc.StatusCode.PERMISSION_DENIED, "only an operator may look at the fleet")
        calling.set(tenant)
        return None


def _tenant(entry: Mapping[str, Any], quotas: Mapping[str, Quota]) -> Tenant:
    name = str(entry["tenant"])
    return Tenant(name, bool(entry.get("operator")), quotas[name])


def _quota(entry: Mapping[str, Any]) -> Quota:
    quota = Quota(
        int(entry.get("max_requests", 0)), int(entry.get("tokens_per_minute", 0)), float(entry.get("weight", 1.0))
    )
    if quota.max_requests < 0 or quota.tokens_per_minute < 0:
        raise ValueError(f"a quota of tenant {entry['tenant']!r} is negative")
    if not 0.01 <= quota.weight <= 100:
        raise ValueError(f"the weight {quota.weight:g} of tenant {entry['tenant']!r} is not within 0.01 and 100")
    return quota


def _digest(entry: Mapping[str, Any]) -> str:
    found = str(entry["token_sha256"])
    if not _DIGEST.fullmatch(found):
        raise ValueError("token_sha256 is not 64 lower-case hex digits")
    return found
