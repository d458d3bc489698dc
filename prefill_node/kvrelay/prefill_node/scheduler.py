"""Which request gets the next chunk. Pure: requests in, chunks out; it knows neither pages nor time.

Chunks of different requests interleave. The request with the fewest tokens left goes first, so a short prompt never
waits for a long one; every `fair_every`-th chunk goes to the request that was served longest ago, so a long prompt is
never starved by short ones. Hence a one-chunk request waits for at most two chunks of longer ones (the one in work and
one fair turn), and each of n requests gets a chunk within fair_every * n.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from kvrelay.core.shard import Span


@dataclass(frozen=True, slots=True)
class NextChunk:
    request_id: str
    tokens: Span
    is_last: bool


@dataclass(slots=True)
class _Running:
    next_token: int
    end_token: int
    arrival: int

    @property
    def tokens_left(self) -> int:
        return self.end_token - self.next_token


class ChunkScheduler:
    """Cuts the prompts of admitted requests into chunks and orders them."""

    def __init__(self, *, chunk_tokens: int, fair_every: int = 4) -> None:
        assert chunk_tokens > 0, chunk_tokens
        assert fair_every > 1, "with a fair turn each time nothing would be preferred"
        self._chunk_tokens = chunk_tokens
        self._fair_every = fair_every
        self._running: dict[str, _Running] = {}  # first who was served, or came, longest ago
        self._by_tokens_left: list[tuple[int, int, str]] = []  # (tokens left, arrival, request), in order
        self._turn = 0
        self._arrivals = 0

    def add(self, request_id: str, tokens: Span) -> None:
        """Begin to schedule the tokens that a request has to compute: at least one."""
        assert request_id not in self._running, f"{request_id} is scheduled already"
        assert tokens.num_tokens > 0, f"{request_id} has nothing to compute"
        self._arrivals += 1
        self._put(request_id, _Running(tokens.start, tokens.end, self._arrivals))

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ones are ignored, since a cancel may come at any time."""
        if request_id in self._running:
            self._take(request_id)

    def next_chunk(self) -> NextChunk | None:
        """Return the chunk to run now, or None when no request is left. Changes nothing: `ran` does."""
        if not self._running:
            return None
        is_fair_turn = (self._turn + 1) % self._fair_every == 0
        chosen = next(iter(self._running)) if is_fair_turn else self._by_tokens_left[0][-1]
        running = self._running[chosen]
        end = min(running.next_token + self._chunk_tokens, running.end_token)
        return NextChunk(chosen, Span(running.next_token, end), is_last=end == running.end_token)

    def ran(self, chunk: NextChunk) -> None:
        """Record that a chunk was computed; a request whose last chunk ran leaves."""
        self._turn += 1
        running = self._running.get(chunk.request_id)
        if running is None:  # cancelled while its chunk was in work
            return
        assert running.next_token == chunk.tokens.start, f"{chunk} does not follow {running}"
        self._take(chunk.request_id)
        running.next_token = chunk.tokens.end
        if running.tokens_left:
            self._put(chunk.request_id, running)

    def _put(self, request_id: str, running: _Running) -> None:
        self._running[request_id] = running
        insort(self._by_tokens_left, (running.tokens_left, running.arrival, request_id))

    def _take(self, request_id: str) -> None:
        running = self._running.pop(request_id)
        place = bisect_left(self._by_tokens_left, (running.tokens_left, running.arrival, request_id))
        del self._by_tokens_left[place]

    def tokens_left(self) -> int:
        """Return the tokens that the running requests still have to compute."""
        return sum(running.tokens_left for running in self._running.values())


def chunks_of(tokens: Span, *, chunk_tokens: int) -> list[Span]:
    """Return the chunks in which `tokens` will be computed, whatever the order between requests."""
    return [
        Span(start, min(start + chunk_tokens, tokens.end)) for start in range(tokens.start, tokens.end, chunk_tokens)
    ]
