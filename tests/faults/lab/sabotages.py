"""Deliberate breakages of the product, by name: each takes one safety out, and a test must notice.

A breakage replaces attributes of loaded modules; `undo` puts them back. A process that has not loaded a module has
nothing of it to break.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

Wrap = Callable[[Any], Any]  # from the original to its replacement


@dataclass(frozen=True, slots=True)
class Change:
    """One attribute of a module, or of a class in it."""

    module: str  # below kvrelay
    path: str
    wrap: Wrap


def _nothing(_: Any) -> Any:
    return lambda *args, **kwargs: None


def _nothing_async(_: Any) -> Any:
    async def nothing(*args: Any, **kwargs: Any) -> None: ...

    return nothing


def _always(value: Any) -> Wrap:
    return lambda _: lambda *args, **kwargs: value


def _as_property(value: Any) -> Wrap:
    return lambda _: property(lambda self: value)


def _no_avoidance(place: Any) -> Any:
    async def careless(self: Any, **question: Any) -> Any:
        return await place(self, **{**question, "avoid": frozenset()})

    return careless


def _forgetful_attempt(attempt: Any) -> Any:
    """A retry that starts the text over."""

    async def forgetful(self: Any, number: int, avoid: Any, failure: Any) -> Any:
        sent, self._sent = self._sent, []
        async for event in attempt(self, number, avoid, failure):
            yield event
        self._sent = sent + self._sent

    return forgetful


def _without_first_logprob(send: Any) -> Any:
    def bare(self: Any, tokens: list[Any]) -> Any:
        from dataclasses import replace  # noqa: PLC0415 - runs in a foreign process

        if not self._sent:
            tokens = [replace(tokens[0], logprob=None), *tokens[1:]]
        return send(self, tokens)

    return bare


def _done_before_it_began(begin: Any) -> Any:
    """A copy that is told of before it has begun."""

    def hasty(self: Any, copy_id: int, *pages: Any, **rest: Any) -> None:
        self._done.append(copy_id)
        begin(self, copy_id, *pages, **rest)

    return hasty


def _told_once(take_done: Any) -> Any:
    told: set[int] = set()

    def once(self: Any) -> list[int]:
        new = [one for one in take_done(self) if one not in told]
        told.update(new)
        return new

    return once


def _by_name_only(_: Any) -> Any:
    return lambda self, other: type(other) is type(self) and other.name == self.name


def _not_by_name_only(_: Any) -> Any:
    return lambda self, other: type(other) is not type(self) or other.name != self.name


def _half_of_them(renew: Any) -> Any:
    def partial(keeper: Any) -> None:
        for grantor in keeper._grantors.values():
            grantor.held = dict(sorted(grantor.held.items())[: len(grantor.held) // 2 or 1])
        renew(keeper)

    return partial


def _shorter_spans(rows_final: Any) -> Any:
    def short(self: Any, layer: int, spans: Any) -> None:
        from kvrelay.core.shard import Span  # noqa: PLC0415

        rows_final(self, layer, [Span(span.start, max(span.start, span.end - 1)) for span in spans])

    return short


def _nothing_kept(resumed: Any) -> Any:
    """A chunk that was paused and goes on with nothing of what it had computed."""

    def forgetful(self: Any, request: Any, chunk: Any) -> Any:
        work = resumed(self, request, chunk)
        work.hidden_TD.zero_()
        return work

    return forgetful


def _abort_says_yes(_: Any) -> Any:
    return lambda self, request, reason: True


def _without_aborts(send: Any) -> Any:
    def silent(self: Any, entry: Any, rank: int, event: Any) -> None:
        if not event.HasField("abort") and not event.HasField("closed"):
            send(self, entry, rank, event)

    return silent


def _swallow(fail: Any) -> Any:
    return lambda self, reason: ()


def _rank_zero(attached: Any) -> Any:
    return lambda self, number: attached(self, 0)


def _no_time(split: Any) -> Any:
    def wrong(self: Any) -> Any:
        from dataclasses import replace  # noqa: PLC0415

        return replace(split(self), prefill_ms=0.0, first_step_ms=0.0)

    return wrong


def _drop_committed(close: Any) -> Any:
    def wasteful(self: Any, key: str, *, abort: bool) -> bool:
        self._pages._cache.drop_all()
        return bool(close(self, key, abort=abort))

    return wasteful


def _one_more(owned_ranges: Any) -> Any:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return owned_ranges(*args, **kwargs)[:-1]

    return wrong


def _never_drained(_: Any) -> Any:
    return lambda *args, **kwargs: _done()


async def _done() -> None: ...


def _sets(_: Any) -> Any:
    return object.__setattr__


def _needs_a_part(receive: Any) -> Any:
    def needy(self: Any, now_s: float) -> Any:
        return receive(self, now_s) if self.landed_tokens else []

    return needy


def _strictly_in_order(part_landed: Any) -> Any:
    def strict(self: Any, event: Any, now_s: float) -> Any:
        number, wanted = event.part.part_id, len(self._attached(event.rank).landed)
        if number != wanted:
            return self._abort(f"part {number} instead of {wanted}", now_s)
        return part_landed(self, event, now_s)

    return strict


def _unbounded(_: Any) -> Any:
    return lambda *, prompt_tokens, max_tokens, limits: 1


def _no_actions(_: Any) -> Any:
    return lambda *args, **kwargs: []


def _when_listed(_: Any) -> Any:
    return property(lambda self: self.listed is not None)


def _no_leases(tick: Any) -> Any:
    def lazy(self: Any, event: Any, now_s: float) -> Any:
        self._lease_until_s = self._deadline_s = now_s + 1e6
        return tick(self, event, now_s)

    return lazy


_DECODE_LEASES = (
    Change("kv_transfer.session", "ReaderSession._tick", _no_leases),
    Change("decode_node.node", "DecodeNode.tick", _nothing),
)

SABOTAGES: dict[str, tuple[Change, ...]] = {
    # leases and ends
    "leases_never_end": (*_DECODE_LEASES, Change("prefill_node.leases", "Leases.check", _nothing)),
    "holders_death_unnoticed": (
        *_DECODE_LEASES,
        Change("decode_node.node", "DecodeNode.close_stream", _nothing),
        Change("prefill_node.leader", "Leader.cancel", _nothing),
    ),
    "renewals_stop": (Change("router.leases", "LeaseKeeper._renew_all", _nothing),),
    "renewals_of_half": (Change("router.leases", "LeaseKeeper._renew_all", _half_of_them),),
    "time_stands_still": (Change("decode_node.lease", "LeaseThread._on_loop", _nothing),),
    "sources_never_free": (Change("prefill_node.handoff", "EndpointWriter._on_sources_free", _nothing),),
    "dead_writers_unnoticed": (Change("kv_transfer.session", "ReaderSession._writer_dead", _no_actions),),
    "abort_does_nothing": (Change("decode_node.node", "DecodeNode.abort", _abort_says_yes),),
    "aborts_not_remembered": (Change("decode_node.records", "Records.was_aborted", _always(False)),),
    "aborts_not_told": (Change("kv_transfer.hub_sessions", "HubSessions._send", _without_aborts),),
    "router_leaves_legs": (
        Change("router.attempt", "Attempt.close", _nothing_async),
        Change("decode_node.node", "DecodeNode.close_stream", _nothing),
    ),
    "deadlines_kept_secret": (
        Change("router.attempt", "Attempt.close", _nothing_async),
        Change("core.clock", "Deadline.remaining_s", _always(600.0)),
    ),
    "ends_at_prefill_not_told": (
        Change("router.attempt", "Attempt.close", _nothing_async),
        Change("decode_node.node", "DecodeNode.close_stream", _nothing),
        Change("prefill_node.handoff", "EndpointWriter.abort", _nothing),
    ),
    # the fence and the check
    "no_fence": (Change("kv_transfer.session", "ReaderSession.all_fenced", _as_property(True)),),
    "links_never_end": (Change("kv_transfer.link_end", "LinkEnd.is_over", _always(False)),),
    "nothing_verified": (
        Change("kv_transfer.hub_sessions", "HubSessions._verify", _always(True)),
        Change("kv_transfer.coverage", "Coverage.complete", _as_property(True)),
        Change("kv_transfer.attached_rank", "AttachedRank.complete", _when_listed),
    ),
    # Not a breakage that a test must notice, but what the safety machinery's cost is measured against.
    "safety_off": (
        Change("kvcache.checksum", "checksum_ranges", _always(0)),
        Change("kv_transfer.hub_sessions", "HubSessions._verify", _always(True)),
        Change("kv_transfer.session", "ReaderSession.all_fenced", _as_property(True)),
    ),
    "zero_bytes_wait": (Change("kv_transfer.session", "ReaderSession._receive", _needs_a_part),),
    "failed_writes_unnoticed": (Change("kv_transfer.outgoing", "Outgoing.fail", _swallow),),
    "parts_in_order_only": (Change("kv_transfer.session", "ReaderSession._part_landed", _strictly_in_order),),
    "all_notices_are_ours": (
        Change("kv_transfer.notice", "NoticeKey.__eq__", lambda _: lambda self, other: True),
        Change("kv_transfer.notice", "NoticeKey.__hash__", lambda _: lambda self: 0),
    ),
    "ranks_mixed_up": (Change("kv_transfer.session", "ReaderSession._attached", _rank_zero),),
    "one_layout_for_all": (Change("core.layout", "PageLayout.fingerprint", _as_property(b"\0" * 16)),),
    "digests_unchecked": (Change("kv_transfer.transport", "Address.check", _nothing),),
    "incarnations_by_name": (
        Change("core.types", "Incarnation.__eq__", _by_name_only),
        Change("core.types", "Incarnation.__ne__", _not_by_name_only),
    ),
    "tokens_unchecked": (Change("kv_transfer.session", "hmac.compare_digest", _always(True)),),
    # one fate
    "no_avoidance": (
        Change("router.placer", "IndexPlacer.place", _no_avoidance),
        Change("router.fleet", "FleetView.put_aside", _nothing),
    ),
    "retry_starts_over": (Change("router.orchestrate", "Run._attempt", _forgetful_attempt),),
    # health, drain, ring
    "nothing_is_ever_stuck": (Change("core.health", "ProgressWatch.check", _always(False)),),
    "drain_waits_for_nobody": (
        Change("prefill_node.serving", "PrefillServer.drained", _never_drained),
        Change("decode_node.serving", "DecodeServer.drained", _never_drained),
    ),
    "ranks_outlive_their_ring": tuple(
        Change(f"prefill_node.{module}", "die", _nothing) for module in ("ring_process", "app", "step_thread")
    ),
    "copies_end_at_once": (
        Change("prefill_node.host_copier", "HostCopier.begin", _done_before_it_began),
        Change("prefill_node.host_copier", "HostCopier.take_done", _told_once),
    ),
    "a_row_is_lost": (Change("prefill_node.relay", "Relay.rows_final", _shorter_spans),),
    "an_owner_is_lost": (Change("kv_transfer.plan", "owned_ranges", _one_more),),
    "a_pause_forgets": (Change("prefill_node.rank", "RankWorker._resumed", _nothing_kept),),
    "committed_blocks_dropped": (Change("prefill_node.control", "RingControl.close", _drop_committed),),
    # the edge
    "first_logprob_lost": (Change("router.orchestrate", "Run._send", _without_first_logprob),),
    "one_id_for_all": (Change("router.servicer", "secrets.token_hex", _always("0" * 16)),),
    "nothing_validated": tuple(
        Change("router.validation", check, _nothing) for check in ("_check_prompt", "check_sampling", "_check_stops")
    ),
    "nodes_trust_their_callers": (
        Change("decode_node.intake", "check_sampling", _nothing),
        Change("decode_node.intake", "output_tokens", _unbounded),
        Change("prefill_node.intake", "check_sampling", _nothing),
        *(Change(f"prefill_node.{module}", "check_request_id", _nothing) for module in ("intake", "servicer")),
        Change("proto.convert", "check_request_id", _nothing),
    ),
    "settings_can_change": (Change("decode_node.settings", "DecodeSettings.__setattr__", _sets),),
    "times_do_not_add_up": (Change("router.timesplit", "RequestTimer.split", _no_time),),
}

_undo: list[Callable[[], None]] = []  # of this process


def apply(name: str) -> None:
    """Break this process; also on top of an earlier breakage."""
    for change in SABOTAGES[name]:
        module = sys.modules.get(f"kvrelay.{change.module}")
        if module is None:
            continue
        owner: Any = module
        *parents, attribute = change.path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        own = attribute in owner.__dict__
        original = owner.__dict__[attribute] if own else getattr(owner, attribute)
        setattr(owner, attribute, change.wrap(original))
        _undo.append(partial(setattr, owner, attribute, original) if own else partial(delattr, owner, attribute))


def undo() -> None:
    """Make this process whole again."""
    while _undo:
        _undo.pop()()
