"""Which request gets the next chunk. Pure: requests in, chunks out; it knows neither pages nor time.

Chunks of different requests interleave. The request with the fewest tokens left goes first, so a short prompt never
waits for a long one; every `fair_every`-th chunk goes to the request that was served longest ago, so a long prompt is
never starved by short ones. Hence a one-chunk request waits for at most two chunks of longer ones (the one in work and
one fair turn), and each of n requests gets a chunk within fair_every * n.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from kvrelay.core.shard import Span


@dataclass(frozen=True, slots=True)
class NextChunk:
    request_id: str
    tokens: Span
    is_last: bool


@dataclass(slots=True)
class _Running:
    request_id: str
    next_token: int
    tokens_left: int
    served: int  # number of the turn that served it last; its arrival turn before the first


_TOKENS_LEFT, _SERVED = attrgetter("tokens_left"), attrgetter("served")


class ChunkScheduler:
    """Cuts the prompts of admitted requests into chunks and orders them."""

    def __init__(self, *, chunk_tokens: int, fair_every: int = 4) -> None:
        assert chunk_tokens > 0, chunk_tokens
        assert fair_every > 1, "with a fair turn each time nothing would be preferred"
        self._chunk_tokens = chunk_tokens
        self._fair_every = fair_every
        self._running: dict[str, _Running] = {}  # in the order of arrival, which is that of equal ones too
        self._turn = 0

    def add(self, request_id: str, tokens: Span) -> None:
        """Begin to schedule the tokens that a request has to compute: at least one."""
        assert request_id not in self._running, f"{request_id} is scheduled already"
        assert tokens.num_tokens > 0, f"{request_id} has nothing to compute"
        self._running[request_id] = _Running(request_id, tokens.start, tokens.num_tokens, self._turn)

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ones are ignored, since a cancel may come at any time."""
        self._running.pop(request_id, None)

    def next_chunk(self) -> NextChunk | None:
        """Return the chunk to run now, or None when no request is left. Changes nothing: `ran` does."""
        if not self._running:
            return None
        is_fair_turn = (self._turn + 1) % self._fair_every == 0
        chosen = min(self._running.values(), key=_SERVED if is_fair_turn else _TOKENS_LEFT)
        num_tokens = min(self._chunk_tokens, chosen.tokens_left)
        tokens = Span(chosen.next_token, chosen.next_token + num_tokens)
        return NextChunk(chosen.request_id, tokens, is_last=num_tokens == chosen.tokens_left)

    def ran(self, chunk: NextChunk) -> None:
        """Record that a chunk was computed; a request whose last chunk ran leaves."""
        self._turn += 1
        running = self._running.get(chunk.request_id)
        if running is None:  # cancelled while its chunk was in work
            return
        assert running.next_token == chunk.tokens.start, f"{chunk} does not follow {running}"
        running.next_token = chunk.tokens.end
        running.tokens_left -= chunk.tokens.num_tokens
        running.served = self._turn
        if not running.tokens_left:
            del self._running[chunk.request_id]

    def tokens_left(self) -> int:
        """Return the tokens that the running requests still have to compute."""
        return sum(running.tokens_left for running in self._running.values())


def chunks_of(tokens: Span, *, chunk_tokens: int) -> list[Span]:
    """Return the chunks in which `tokens` will be computed, whatever the order between requests."""
    return [
        Span(start, min(start + chunk_tokens, tokens.end)) for start in range(tokens.start, tokens.end, chunk_tokens)
    ]
