"""Where a request's time went, on one clock; the parts add up to the client's waits by construction.

queue + tokenize + place + reserve + prefill + delivery = time to the first token;
exposed relay + verify + admit + first step = time from the first to the second token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.core.clock import Clock, monotonic


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """All in milliseconds; see TimeSplit in inference.proto for each part's meaning."""

    queue_ms: float
    tokenize_ms: float
    place_ms: float
    reserve_ms: float
    prefill_ms: float
    delivery_ms: float
    exposed_relay_ms: float
    verify_ms: float
    admit_ms: float
    first_step_ms: float
    ttft_ms: float
    second_token_ms: float
    total_ms: float
    compute_ms: float  # of prefill_ms
    decode_step_ms: float  # of first_step_ms


@dataclass(slots=True)
class RequestTimer:
    """Marks of one request. What an earlier, failed attempt took counts as queueing of the one that succeeded."""

    clock: Clock = monotonic
    tokenize_ms: float = 0.0  # set by the servicer
    prefill_ms: float = 0.0  # reported by prefill with the first token
    exposed_relay_ms: float = 0.0  # these three are reported by decode at admission
    verify_ms: float = 0.0
    admit_ms: float = 0.0
    compute_ms: float = 0.0  # reported by prefill, as part of prefill_ms
    decode_step_ms: float = 0.0  # reported by decode at the end: the step of the second token
    _arrived_s: float = field(init=False)
    _attempt_s: float | None = None
    _placed_s: float | None = None
    _reserved_s: float | None = None
    _token_s: list[float] = field(default_factory=list)  # of the first two tokens

    def __post_init__(self) -> None:
        self._arrived_s = self.clock()

    def attempt_begins(self) -> None:
        """Start anew, unless the client has its first token: then its parts are history and stay."""
        if not self._token_s:
            self._attempt_s, self._placed_s, self._reserved_s = self.clock(), None, None

    def placed(self) -> None:
        if not self._token_s:
            self._placed_s = self.clock()

    def reserved(self) -> None:
        """The prompt waits for no room any more."""
        if not self._token_s:
            self._reserved_s = self.clock()

    def tokens_left(self, num_tokens: int) -> None:
        """Mark tokens that go out to the client now."""
        self._token_s.extend([self.clock()] * min(num_tokens, 2 - len(self._token_s)))

    def split(self) -> TimeSplit:
        """Return the parts as they stand now; parts that did not happen are 0."""
        attempt_s = self._arrived_s if self._attempt_s is None else self._attempt_s
        placed_s = attempt_s if self._placed_s is None else self._placed_s
        reserved_s = placed_s if self._reserved_s is None else self._reserved_s
        ttft_ms = _ms(self._arrived_s, self._token_s[0]) if self._token_s else 0.0
        second_ms = _ms(self._arrived_s, self._token_s[1]) if len(self._token_s) == 2 else 0.0
        before_attempt_ms = _ms(self._arrived_s, attempt_s)
        tokenize_ms = min(self.tokenize_ms, before_attempt_ms)
        prefill_ms, delivery_ms = _fill(_ms(reserved_s, self._token_s[0]) if self._token_s else 0.0, self.prefill_ms)
        hand_off = _fill(
            max(0.0, second_ms - ttft_ms) if second_ms else 0.0, self.exposed_relay_ms, self.verify_ms, self.admit_ms
        )
        return TimeSplit(
            queue_ms=before_attempt_ms - tokenize_ms,
            tokenize_ms=tokenize_ms,
            place_ms=_ms(attempt_s, placed_s),
            reserve_ms=_ms(placed_s, reserved_s),
            prefill_ms=prefill_ms,
            delivery_ms=delivery_ms,
            exposed_relay_ms=hand_off[0],
            verify_ms=hand_off[1],
            admit_ms=hand_off[2],
            first_step_ms=hand_off[3],
            ttft_ms=ttft_ms,
            second_token_ms=second_ms,
            total_ms=_ms(self._arrived_s, self.clock()),
            compute_ms=min(self.compute_ms, prefill_ms),
            decode_step_ms=min(self.decode_step_ms, hand_off[3]),
        )


def _ms(start_s: float, end_s: float) -> float:
    return (end_s - start_s) * 1e3


def _fill(total_ms: float, *reported_ms: float) -> tuple[float, ...]:
    """Return the reported parts, cut where they would exceed the total, and what is left of it.

    Nodes measure with their own clocks and may overlap with what the router saw; the client's clock decides.
    """
    parts: list[float] = []
    for reported in reported_ms:
        parts.append(min(max(reported, 0.0), total_ms - sum(parts)))
    return (*parts, total_ms - sum(parts))
