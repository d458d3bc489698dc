"""The reader's side of a hand-off: the only owner of its state.

Two rules hold this file together. Events come in, actions go out: no I/O, no clock, no thread. And an event that
the table does not allow, or that names something stale, raises and changes nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.core.errors import InvalidRequestError, LayoutMismatchError, StaleMessageError
from kvrelay.kv_transfer import session_events as ev
from kvrelay.kv_transfer.attached_rank import AttachedRank
from kvrelay.kv_transfer.coverage import Coverage
from kvrelay.kv_transfer.session_events import Action, Event
from kvrelay.kv_transfer.session_table import TRANSITIONS, State
from kvrelay.kv_transfer.values import FenceProof, Manifest, Reservation

_BEFORE_ADMISSION = frozenset({State.RESERVED, State.ATTACHED, State.RECEIVING, State.SEALED})
_AWAITS_FENCES = frozenset({State.RELEASED, State.ABORTING})


@dataclass(frozen=True, slots=True)
class Times:
    """When things happened, in the owner's monotonic seconds; None = not yet."""

    manifest_s: float | None = None  # rank 0's
    last_landed_s: float | None = None
    sealed_s: float | None = None


class ReaderSession:
    """One epoch on the decode side. Not locked: one thread feeds it."""

    def __init__(
        self, reservation: Reservation, *, deadline_s: float, lease_until_s: float, fence_timeout_s: float
    ) -> None:
        self.reservation = reservation
        self.state = State.RESERVED
        self.times = Times()
        self.first_manifest: Manifest | None = None  # rank 0's
        self.failure: str | None = None  # why it was aborted
        self.writer_dead = False
        self.num_duplicates = 0  # parts announced twice with equal content
        self.landed_tokens = 0  # summed over layers
        self.early_tokens = 0  # of these, verified before rank 0's manifest came in
        self.waits_since_s: float | None = None  # since when only fences are missing
        self._name = f"epoch {reservation.epoch}"
        self._deadline_s = deadline_s
        self._lease_until_s = lease_until_s
        self._fence_timeout_s = fence_timeout_s
        self._ranks: dict[int, AttachedRank] = {}
        self._coverage = Coverage(reservation.relayed_tokens, num_layers=reservation.num_layers)

    @property
    def all_fenced(self) -> bool:
        """True when no write under this epoch can still land, given that no further rank attaches."""
        return all(rank.proof is not None for rank in self._ranks.values())

    @property
    def proofs(self) -> Mapping[int, FenceProof]:
        return {number: rank.proof for number, rank in self._ranks.items() if rank.proof is not None}

    def stream_of(self, rank: int) -> bytes | None:
        """Return the id of the stream by which a rank was let in, or None when it was not."""
        return self._ranks[rank].stream_id if rank in self._ranks else None

    def handle(self, event: Event, *, now_s: float) -> tuple[Action, ...]:
        """Apply one event.

        Returns:
            What the owner must do, in order.

        Raises:
            StaleMessageError: the event is illegal in this state, or names an older writer, request or token.
            InvalidRequestError: it names a rank that does not exist.
            LayoutMismatchError: the writer's pages mean something else.
            In each case nothing has changed.
        """
        legal = TRANSITIONS[self.state].get(type(event))
        if legal is None:
            why = f": {self.failure}" if self.failure else ""
            raise StaleMessageError(f"{self._name}: {type(event).__name__} is not legal when {self.state.value}{why}")
        actions = self._apply(event, now_s)
        assert self.state in legal, f"{type(event).__name__} led to {self.state.value}, not one of {legal}"
        return tuple(actions)

    def _apply(self, event: Event, now_s: float) -> list[Action]:  # noqa: PLR0911, PLR0912 (one line per event)
        match event:
            case ev.Attach():
                return self._attach(event)
            case ev.PartLanded():
                return self._part_landed(event, now_s)
            case ev.ManifestIn():
                return self._manifest_in(event, now_s)
            case ev.Admitted():
                return self._admitted()
            case ev.Claimed():
                self.state = State.ADMITTED
                return []
            case ev.Released():
                return self._released(now_s)
            case ev.Abort():
                return self._on_abort(event, now_s)
            case ev.Fenced():
                return self._fenced(event, now_s)
            case ev.StreamLost():
                return self._stream_lost(event, now_s)
            case ev.WriterDead():
                return self._writer_dead(event, now_s)
            case ev.Drained():
                return self._drained()
            case ev.Freed():
                return self._freed()
            case ev.Renew():
                self._lease_until_s = now_s + event.lease_s
                return []
            case ev.Tick():
                return self._tick(event, now_s)

    # ---- the way to admission ----

    def _attach(self, event: ev.Attach) -> list[Action]:
        ours = self.reservation
        if event.writer != ours.writer or event.request != ours.request:
            raise StaleMessageError(
                f"{self._name} is for {ours.request} written by {ours.writer}, not {event.request} by {event.writer}"
            )
        if not hmac.compare_digest(event.one_time_token, ours.one_time_token):
            raise StaleMessageError(f"{self._name}: wrong token")
        if not 0 <= event.rank < ours.ring_size:
            raise InvalidRequestError(f"{self._name}: rank {event.rank} of a ring of {ours.ring_size}")
        if event.rank in self._ranks:
            raise StaleMessageError(f"{self._name}: rank {event.rank} has used its token")
        if event.fingerprint != ours.fingerprint:
            raise LayoutMismatchError(
                f"{self._name}: layout {event.fingerprint.hex()} of the writer, {ours.fingerprint.hex()} here"
            )
        self._ranks[event.rank] = AttachedRank(event.stream_id)
        if self.state is State.RESERVED:
            self.state = State.ATTACHED
        return [ev.SendAttached(event.rank)]

    def _part_landed(self, event: ev.PartLanded, now_s: float) -> list[Action]:
        rank, part = self._attached(event.rank), event.part
        name = f"rank {event.rank} part {part.part_id}"
        if not event.verified:
            return self._abort(f"{name}: the bytes that landed do not match their checksum", now_s)
        if rank.landed.get(part.part_id) == part:
            self.num_duplicates += 1
            return []
        refusal = self._coverage.refusal(part.layer, part.tokens) or rank.refusal_of_part(part)
        if refusal is not None:
            return self._abort(f"{name}: {refusal}", now_s)
        self._coverage.add(part.layer, part.tokens)
        rank.add_part(part, now_s)
        self.landed_tokens += part.tokens.num_tokens
        if self.times.manifest_s is None or event.verified_at_s <= self.times.manifest_s:
            self.early_tokens += part.tokens.num_tokens
        self.times = Times(self.times.manifest_s, event.landed_at_s)
        return self._receive(now_s)

    def _manifest_in(self, event: ev.ManifestIn, now_s: float) -> list[Action]:
        manifest = event.manifest
        rank = self._attached(manifest.rank)
        name = f"rank {manifest.rank}"
        if rank.listed is not None:
            raise StaleMessageError(f"{self._name}: a second manifest of {name}")
        refusal = rank.take_manifest(manifest)
        if refusal is not None:
            return self._abort(f"{name}: {refusal}", now_s)
        if manifest.rank == 0:
            if manifest.first_token is None and self.reservation.wants_token:
                return self._abort("the manifest of rank 0 has no first token", now_s)
            self.first_manifest = manifest
            self.times = Times(now_s, self.times.last_landed_s)
        return self._receive(now_s)

    def _receive(self, now_s: float) -> list[Action]:
        """Seal when everything that must arrive has arrived."""
        self.state = State.RECEIVING
        ranks = self._ranks.values()
        if len(ranks) < self.reservation.ring_size or not all(rank.complete for rank in ranks):
            return []
        if not self._coverage.complete:
            return self._abort("the parts do not cover every layer of every relayed token exactly once", now_s)
        self.state = State.SEALED
        self.times = Times(self.times.manifest_s, self.times.last_landed_s, now_s)
        return [ev.Admit()]

    def _admitted(self) -> list[Action]:
        self.state = State.ADMITTED
        return [ev.SendAdmitted(number) for number, rank in self._ranks.items() if rank.stream_open]

    # ---- the way to the end ----

    def _on_abort(self, event: ev.Abort, now_s: float) -> list[Action]:
        if self.state in _BEFORE_ADMISSION:
            return self._abort(event.reason, now_s)
        if self.state is State.ADMITTED and self.failure is None:
            # The batch may be using the pages: its owner lets go of them first, by Released.
            self.failure = event.reason
            return [ev.Fail(event.reason)]
        return []  # given up already, or over

    def _abort(self, reason: str, now_s: float) -> list[Action]:
        self.failure = reason
        self.state, self.waits_since_s = State.ABORTING, now_s
        # A rank that is fenced already waits for the admission, so it must hear too.
        told: list[Action] = [ev.SendAbort(number, reason) for number, rank in self._ranks.items() if rank.stream_open]
        return [*told, ev.Fail(reason), *self._if_all_fenced()]

    def _released(self, now_s: float) -> list[Action]:
        self.state, self.waits_since_s = State.RELEASED, now_s
        return self._if_all_fenced()

    def _fenced(self, event: ev.Fenced, now_s: float) -> list[Action]:
        rank = self._attached(event.rank)
        if event.proof is FenceProof.KNOWN_DEAD:
            raise InvalidRequestError(f"{self._name}: no rank can report its own death")
        if rank.proof is not None:
            raise StaleMessageError(f"{self._name}: a second fence of rank {event.rank}")
        rank.proof, rank.quiet_since_s = event.proof, now_s
        if self.state in (State.ATTACHED, State.RECEIVING) and rank.listed is None:
            return self._abort(f"rank {event.rank} stopped before its manifest", now_s)
        return self._if_all_fenced()

    def _stream_lost(self, event: ev.StreamLost, now_s: float) -> list[Action]:
        rank = self._attached(event.rank)
        rank.stream_open = False
        if self.state in (State.ATTACHED, State.RECEIVING) and rank.proof is None:
            return self._abort(f"rank {event.rank} went away before everything had landed", now_s)
        return []

    def _writer_dead(self, event: ev.WriterDead, now_s: float) -> list[Action]:
        if self.writer_dead:
            return []
        self.writer_dead = True
        actions: list[Action] = []
        if self.state in (State.RESERVED, State.ATTACHED, State.RECEIVING):
            actions = self._abort(f"writer {self.reservation.writer} is gone: {event.why}", now_s)
        return actions if self.all_fenced else [*actions, ev.Drain()]

    def _drained(self) -> list[Action]:
        if not self.writer_dead:
            raise StaleMessageError(f"{self._name}: drained, but its writer is not known to be gone")
        for rank in self._ranks.values():
            rank.proof = rank.proof or FenceProof.KNOWN_DEAD
        return self._if_all_fenced()

    def _if_all_fenced(self) -> list[Action]:
        if self.state not in (*_AWAITS_FENCES, State.QUARANTINED) or not self.all_fenced:
            return []
        self.state = State.FENCED
        return [ev.FreePages()]

    def _freed(self) -> list[Action]:
        self.state = State.FREE
        return [ev.SendClosed(number) for number, rank in self._ranks.items() if rank.stream_open]

    # ---- time ----

    def _tick(self, event: ev.Tick, now_s: float) -> list[Action]:
        if self.state in _BEFORE_ADMISSION:
            if now_s >= self._deadline_s:
                return self._abort("the hand-off's time is over", now_s)
            if now_s >= self._lease_until_s:
                return self._abort("the holder's lease has run out", now_s)
        if self.state in _AWAITS_FENCES:
            assert self.waits_since_s is not None
            if now_s >= self.waits_since_s + self._fence_timeout_s:
                self.state = State.QUARANTINED
                return [ev.Quarantine()]
        return self._if_lost(event, now_s) if self.state is State.RECEIVING else []

    def _if_lost(self, event: ev.Tick, now_s: float) -> list[Action]:
        """Give up when a rank has seen all its writes end and yet a part of it was not announced here."""
        # Parts that wait to be verified are not lost, however long the queue.
        heard_until_s = min(now_s, event.caught_up_s)
        for number, rank in self._ranks.items():
            if (lost := rank.lost(heard_until_s)) is not None:
                return self._abort(f"rank {number}: {lost}", now_s)
        return []

    def _attached(self, number: int) -> AttachedRank:
        if number not in self._ranks:
            raise StaleMessageError(f"{self._name}: rank {number} has not attached")
        return self._ranks[number]
