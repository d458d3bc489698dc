"""Which sequences take part in the next step. Pure; owned by the step thread.

Sequences join and leave between steps. When more are running than fit into a batch, they take turns: those that were
stepped go to the back, so each of n sequences is stepped at least once in ceil(n / max_batch) steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.core.types import FinishReason


@dataclass(slots=True)
class Sequence:
    """One running request, as the scheduler sees it. Filled at admission, advanced by `take`."""

    key: int  # epoch counter
    position: int  # of last_token in prompt plus output; its row is not written yet
    last_token: int  # to be fed in the next step
    tokens_left: int  # still to be generated
    stop_ids: frozenset[int]


class DecodeScheduler:
    """The running sequences in the order of their turns."""

    def __init__(self, *, max_batch: int) -> None:
        assert max_batch > 0, max_batch
        self._max_batch = max_batch
        self._running: dict[int, Sequence] = {}  # in order of turns

    def __len__(self) -> int:
        return len(self._running)

    def join(self, sequence: Sequence) -> None:
        """Let a sequence take part from the next step on."""
        assert sequence.key not in self._running, f"sequence {sequence.key} is running already"
        assert sequence.tokens_left > 0, f"sequence {sequence.key} has nothing to generate"
        self._running[sequence.key] = sequence

    def leave(self, key: int) -> bool:
        """Drop a sequence; False when it is not running (it has ended just now, or never joined)."""
        return self._running.pop(key, None) is not None

    def plan(self) -> tuple[Sequence, ...]:
        """Return the sequences of the next step. Changes nothing: `take` does."""
        keys = list(self._running)[: self._max_batch]
        return tuple(self._running[key] for key in keys)

    def take(self, key: int, token_id: int) -> FinishReason | None:
        """Record the token that a step chose for a sequence; one that has ended leaves.

        Returns:
            Why the sequence ended, or None when it goes on.
        """
        sequence = self._running.pop(key)
        sequence.position += 1
        sequence.last_token = token_id
        sequence.tokens_left -= 1
        if token_id in sequence.stop_ids:
            return FinishReason.STOP
        if sequence.tokens_left == 0:
            return FinishReason.LENGTH
        self._running[key] = sequence  # at the back
        return None
