"""The writer's side of a hand-off, one per rank: when to post, when the sources are free, what was proven.

As in session.py: events in, actions out, and an illegal event raises and changes nothing.
"""

from __future__ import annotations

import math

from kvrelay.core.errors import StaleMessageError
from kvrelay.kv_transfer import writer_table as wt
from kvrelay.kv_transfer.values import FenceProof, Part
from kvrelay.kv_transfer.writer_table import WRITER_TRANSITIONS, WriterAction, WriterEvent, WriterState

_POSTED = frozenset({WriterState.POSTING, WriterState.SEALING})
_LIVE = frozenset({WriterState.PENDING, WriterState.ATTACHED, *_POSTED})


class WriterSession:
    """One rank's part in one epoch. Not locked: one thread feeds it."""

    def __init__(self, name: str, *, deadline_s: float, fence_timeout_s: float) -> None:
        self.state = WriterState.PENDING
        self.failure: str | None = None
        self.num_posted = 0
        self._name = name
        self._deadline_s = deadline_s
        self._fence_timeout_s = fence_timeout_s
        self._fence_deadline_s = math.inf
        self._parts: list[Part] = []
        self._sealed: wt.Seal | None = None
        self._drained = False
        self._admitted = False

    def handle(self, event: WriterEvent, *, now_s: float) -> tuple[WriterAction, ...]:
        """Apply one event.

        Returns:
            What the owner must do, in order.

        Raises:
            StaleMessageError: the event is illegal in this state; nothing has changed.
        """
        legal = WRITER_TRANSITIONS[self.state].get(type(event))
        if legal is None or (self._is_live and self._contradicts(event)):
            raise StaleMessageError(f"{self._name}: {type(event).__name__} is not legal when {self.state.value}")
        actions = self._apply(event, now_s)
        assert self.state in legal, f"{type(event).__name__} led to {self.state.value}, not one of {legal}"
        return tuple(actions)

    @property
    def _is_live(self) -> bool:
        return self.state in _LIVE

    def _contradicts(self, event: WriterEvent) -> bool:
        """Return whether an event cannot follow what has come before: work after the seal, an end of no write."""
        if isinstance(event, wt.AddPart | wt.Seal):
            return self._sealed is not None
        return isinstance(event, wt.WriteFailed) and (self.num_posted == 0 or self._drained)

    def _apply(self, event: WriterEvent, now_s: float) -> list[WriterAction]:  # noqa: PLR0911 (one line per event)
        match event:
            case wt.Attached():
                return self._attached()
            case wt.AddPart() | wt.Seal():
                return self._add(event)
            case wt.WriteFailed():
                return self._give_up(event.reason, now_s, tell_reader=True)
            case wt.Drained():
                return self._on_drained()
            case wt.FenceDone() | wt.FenceFailed():
                return self._on_fence(event)
            case wt.Admitted():
                self._admitted = True
                return self._settle_if_done()
            case wt.GiveUp():
                return self._give_up(event.reason, now_s, tell_reader=event.tell_reader)
            case wt.StreamLost():
                return self._give_up(event.reason, now_s, tell_reader=False)
            case wt.Tick():
                return self._tick(now_s)

    def _attached(self) -> list[WriterAction]:
        self.state = WriterState.ATTACHED
        posts = [action for part in self._parts for action in self._post(part)]
        return [*posts, *(self._seal(self._sealed) if self._sealed is not None else [])]

    def _add(self, event: wt.AddPart | wt.Seal) -> list[WriterAction]:
        if not self._is_live:
            return []  # the step thread does not know yet that it is over
        waiting = self.state is WriterState.PENDING
        if isinstance(event, wt.AddPart):
            self._parts.append(event.part)
            return [] if waiting else self._post(event.part)
        self._sealed = event
        return [] if waiting else self._seal(event)

    def _post(self, part: Part) -> list[WriterAction]:
        self.state = WriterState.POSTING
        self.num_posted += 1
        return [wt.Post(part)]

    def _seal(self, seal: wt.Seal) -> list[WriterAction]:
        self.state = WriterState.SEALING
        manifest = wt.SendManifest(tuple(self._parts), seal.first_token, seal.cached_tokens)
        if self.num_posted:
            return [manifest, wt.Finish()]
        self._drained = True
        return [manifest, wt.SendFenced(FenceProof.NOTHING_POSTED), wt.FreeSources()]

    def _on_drained(self) -> list[WriterAction]:
        self._drained = True
        if self.state is not WriterState.SEALING:
            return [wt.FreeSources()]
        # No handle failed, or we would be ABORTING: each was seen DONE.
        return [wt.SendFenced(FenceProof.HANDLES_DONE), wt.FreeSources(), *self._settle_if_done()]

    def _settle_if_done(self) -> list[WriterAction]:
        if self.state is not WriterState.SEALING or not (self._drained and self._admitted):
            return []
        self.state = WriterState.SETTLED
        return [wt.Settle()]

    def _give_up(self, reason: str, now_s: float, *, tell_reader: bool) -> list[WriterAction]:
        if not self._is_live:
            return []
        self.failure = reason
        told: list[WriterAction] = [wt.SendAbort(reason)] if tell_reader else []
        if self.state in _POSTED and not self._drained:
            self.state = WriterState.ABORTING
            self._fence_deadline_s = now_s + self._fence_timeout_s
            return [*told, wt.StopAndFence()]
        proven = self._drained  # then the fence is out already
        self.state = WriterState.FENCED
        fenced: list[WriterAction] = [] if proven else [wt.SendFenced(FenceProof.NOTHING_POSTED), wt.FreeSources()]
        return [*told, *fenced, wt.Fail(reason)]

    def _on_fence(self, event: wt.FenceDone | wt.FenceFailed) -> list[WriterAction]:
        if self.state in (WriterState.STUCK, WriterState.LOST) and isinstance(event, wt.FenceDone):
            return [wt.SendFenced(event.proof)]  # the peer takes our writes again, or never will: its pages wait for it
        if self.state is not WriterState.ABORTING:
            return []
        assert self.failure is not None
        if isinstance(event, wt.FenceDone):
            self.state = WriterState.FENCED
            return [wt.SendFenced(event.proof), wt.Fail(self.failure)]
        self.state = WriterState.LOST
        return [wt.Fail(f"{self.failure}; no fence: {event.reason}")]

    def _tick(self, now_s: float) -> list[WriterAction]:
        if self._is_live and now_s >= self._deadline_s:
            return self._give_up("the hand-off's time is over", now_s, tell_reader=True)
        if self.state is WriterState.ABORTING and now_s >= self._fence_deadline_s:
            self.state = WriterState.STUCK
            return [wt.Fail(f"{self.failure}; no fence within {self._fence_timeout_s:g} s", stuck=True)]
        return []
