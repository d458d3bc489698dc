"""What a reader hub tells the rest of its node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvrelay.core.types import Epoch, SampledToken
from kvrelay.kv_transfer.values import Request


@dataclass(frozen=True, slots=True)
class AdmittedHandoff:
    """Every part of every rank is here and right; the pages may be read."""

    epoch: Epoch
    request_id: str
    first_token: SampledToken | None  # None: only latents were asked for
    cached_tokens: int  # prompt tokens that prefill took from its cache
    exposed_relay_ms: float  # from rank 0's manifest until the last part had landed; 0 when all had landed before
    verify_ms: float  # from then until all was verified
    relayed_bytes: int
    early_bytes: int  # of these, verified before rank 0's manifest came in
    sealed_at_s: float  # on the hub's clock; admission time counts from here


@dataclass(frozen=True, slots=True)
class HubCallbacks:
    """Called on the event loop's thread; they must be quick."""

    on_admitted: Callable[[AdmittedHandoff], None]  # may raise a ServeError to refuse
    on_failed: Callable[[Epoch, Request, str], None]  # the request ends here; its pages come back later
    on_pages_free: Callable[[Epoch, tuple[int, ...]], None]  # the only way by which pages come back
    wants_token: bool = True  # what is handed over comes with the first token of its answer
    on_quarantined: Callable[[Epoch], None] = lambda epoch: None  # a fence is overdue; `on_pages_free` may still come
    on_landed: Callable[[], None] = lambda: None  # parts of some request have landed


@dataclass(frozen=True, slots=True)
class HubStats:
    sessions: Mapping[str, int]  # by state name
    held_pages: int  # of all sessions
    quarantined_pages: int
    oldest_quarantine_s: float  # 0 when there is none
    tombstones: int
