"""What a tenant may have at a time and per minute. Pure; memory is bounded by the tenants of the token file."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.errors import QuotaError
from kvrelay.router.tenants import Tenant

_MINUTE_S = 60.0
_BUSY_RETRY_S = 1.0  # when a request of the same tenant will end is not known


@dataclass(slots=True)
class _Account:
    requests: int = 0
    tokens: float = 0.0  # charged and not paid back by time
    as_of_s: float = 0.0


@dataclass(slots=True)
class Charge:
    """One request that was let in. Settle it once it has ended."""

    tenant: Tenant
    tokens: int
    is_settled: bool = False


class QuotaBooks:
    """Counts per tenant. A bucket of one minute's tokens that fills up evenly."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._accounts: dict[str, _Account] = {}
        self._clock = clock

    def enter(self, tenant: Tenant, *, prompt_tokens: int, max_tokens: int) -> Charge:
        """Charge a request with all that it may use.

        Raises:
            QuotaError: that is more than the tenant may have now; names the quota and its limit.
        """
        quota, account = tenant.quota, self._account(tenant)
        if quota.max_requests and account.requests >= quota.max_requests:
            raise QuotaError(
                f"tenant {tenant.name!r} has {account.requests} requests in work, "
                f"its quota max_requests is {quota.max_requests}",
                retry_after_s=_BUSY_RETRY_S,
            )
        tokens = prompt_tokens + max_tokens
        limit = quota.tokens_per_minute
        # One request larger than a minute's tokens is let in when nothing else was charged lately.
        if limit and account.tokens > 0 and account.tokens + tokens > limit:
            over = min(account.tokens, account.tokens + tokens - limit)
            raise QuotaError(
                f"tenant {tenant.name!r} asks for {tokens} tokens and has used {account.tokens:.0f} lately, "
                f"its quota tokens_per_minute is {limit}",
                retry_after_s=over / limit * _MINUTE_S,
            )
        account.requests += 1
        account.tokens += tokens
        return Charge(tenant, tokens)

    def settle(self, charge: Charge, *, used_tokens: int) -> None:
        """A request has ended: give back what it did not use. The second time nothing happens."""
        if charge.is_settled:
            return
        charge.is_settled = True
        account = self._account(charge.tenant)
        account.requests -= 1
        account.tokens = max(0.0, account.tokens - max(0, charge.tokens - used_tokens))

    def _account(self, tenant: Tenant) -> _Account:
        account = self._accounts.setdefault(tenant.name, _Account())
        now_s = self._clock()
        paid_back = (now_s - account.as_of_s) / _MINUTE_S * tenant.quota.tokens_per_minute
        account.tokens, account.as_of_s = max(0.0, account.tokens - paid_back), now_s
        return account
