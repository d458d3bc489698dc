"""Which request gets the next chunk. Pure: requests in, chunks out; it knows no pages, and of time what it is told.

Chunks of different requests interleave. The request with the fewest tokens left goes first, so a short prompt never
waits for a long one; every `fair_every`-th turn goes to the request that was served longest ago, so a long prompt is
never starved by short ones. Hence a one-chunk request waits for at most two chunks of longer ones (the one in work and
one fair turn), and each of n requests gets a chunk within fair_every * n.

A chunk may also be paused between two layers, most often for somebody who has much less to compute (giving_way.py says
when), and goes on later. Beside it only such requests begin; what has no less to compute waits until it is done, and
comes next then if a fair turn went to the paused chunk instead. A request that was passed over so is owed a share of
the time that the others took, 1 / fair_every of all, and is not paused again for anybody before it has had that.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.core.shard import Span
from kvrelay.prefill_node.giving_way import Waiting, is_clearly_less

MOST_PAUSED = 2  # chunks at once, beside the one in work: each keeps its hidden states in memory


@dataclass(frozen=True, slots=True)
class NextChunk:
    request_id: str
    tokens: Span
    is_last: bool
    resumes: bool = False  # the ranks have begun it


@dataclass(slots=True)
class _Running:
    next_token: int
    end_token: int
    arrival: int
    paused: NextChunk | None = None  # the next chunk, of which some layers are done
    done_tokens: int = 0  # those layers, as so many tokens in all layers
    owed_s: float = 0.0  # that it computes before it gives way again

    @property
    def tokens_left(self) -> int:
        return self.end_token - self.next_token - self.done_tokens


class ChunkScheduler:
    """Cuts the prompts of admitted requests into chunks and orders them."""

    def __init__(self, *, chunk_tokens: int, fair_every: int = 4) -> None:
        assert chunk_tokens > 0, chunk_tokens
        assert fair_every > 1, "with a fair turn each time nothing would be preferred"
        self._chunk_tokens = chunk_tokens
        self._fair_every = fair_every
        self._running: dict[str, _Running] = {}  # first who was served, or came, longest ago
        self._by_tokens_left: list[tuple[int, int, str]] = []  # (tokens left, arrival, request), in order
        self._turns_since_fair = 0
        self._passed = False  # a fair turn went to a paused chunk, though another request was served longer ago
        self._served: _Running | None = None  # last
        self._meant: str | None = None  # who is next if it is here
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
        """Return the chunk to run now, or None when no request is left. Changes nothing: `ran` and `paused` do."""
        if not self._running:
            return None
        chosen = self._choose(self._paused())
        running = self._running[chosen]
        if running.paused is not None:
            return running.paused
        end = min(running.next_token + self._chunk_tokens, running.end_token)
        return NextChunk(chosen, Span(running.next_token, end), is_last=end == running.end_token)

    def _choose(self, paused: Sequence[str]) -> str:
        if self._meant in self._running:
            return self._meant
        if self._is_fair_turn(paused):
            return next(iter(paused or self._running))
        first = self._by_tokens_left[0][-1]
        if not paused or first in paused:
            return first
        least = min(paused, key=lambda key: self._running[key].tokens_left)
        return first if is_clearly_less(self._running[first].tokens_left, self._running[least].tokens_left) else least

    def ran(self, chunk: NextChunk, took_s: float = 0.0) -> None:
        """Record that a chunk, or what was left of it, was computed; a request whose last chunk ran leaves.

        Args:
            took_s: what it took now.
        """
        self._end_turn(chunk.request_id, took_s)
        running = self._running.get(chunk.request_id)
        if running is None:  # cancelled while its chunk was in work
            return
        assert running.next_token == chunk.tokens.start, f"{chunk} does not follow {running}"
        self._take(chunk.request_id)
        running.next_token, running.done_tokens, running.paused = chunk.tokens.end, 0, None
        if running.tokens_left:
            self._put(chunk.request_id, running)

    def paused(self, chunk: NextChunk, took_s: float, *, left: float, favoured: str | None) -> None:
        """Record that a chunk was left between two layers.

        Args:
            took_s: what its layers took now.
            left: which part of its layers is not done.
            favoured: for whom; None: not for anybody, so it goes on if it is still owed time.
        """
        self._end_turn(chunk.request_id, took_s, counts=favoured is not None)
        running = self._running.get(chunk.request_id)
        if running is None:
            return
        self._take(chunk.request_id)
        running.paused = NextChunk(chunk.request_id, chunk.tokens, chunk.is_last, resumes=True)
        running.done_tokens = int(chunk.tokens.num_tokens * (1 - left))
        self._put(chunk.request_id, running)
        self._meant = chunk.request_id if favoured is None and running.owed_s else favoured

    def took_longer(self, took_s: float) -> None:
        """Record that a device was still at the last turn's chunk for so long after that turn had ended."""
        self._charge(self._served, took_s)

    def lost(self, chunk: NextChunk) -> None:
        """Record that the ranks have stopped a chunk and have nothing of it any more."""
        running = self._running.get(chunk.request_id)
        if running is not None:
            self._take(chunk.request_id)
            running.paused, running.done_tokens = None, 0
            self._put(chunk.request_id, running)

    def may_pause(self, request_id: str) -> bool:
        """The request's chunk may be left for now: not too many others are."""
        return sum(key != request_id for key in self._paused()) < MOST_PAUSED

    def owed_s(self, request_id: str) -> float:
        """Return for how long a request's chunk has to run before it gives way."""
        running = self._running.get(request_id)
        return 0.0 if running is None else running.owed_s

    def waiting_beside(self, request_id: str) -> list[Waiting]:
        """Return the other requests that could begin their next chunk now, and all that they have to compute."""
        return [
            Waiting(key, Span(running.next_token, running.end_token))
            for key, running in self._running.items()
            if key != request_id and running.paused is None
        ]

    def tokens_left(self) -> int:
        """Return the tokens that the running requests still have to compute."""
        return sum(running.tokens_left for running in self._running.values())

    def _is_fair_turn(self, paused: Sequence[str]) -> bool:
        return self._turns_since_fair >= self._fair_every - 1 or (self._passed and not paused)

    def _paused(self) -> list[str]:
        return [key for key, running in self._running.items() if running.paused is not None]

    def _end_turn(self, request_id: str, took_s: float, *, counts: bool = True) -> None:
        is_meant, self._meant = self._meant in self._running, None
        if counts and not is_meant:
            if self._is_fair_turn(self._paused()):
                self._turns_since_fair, self._passed = 0, request_id != next(iter(self._running), request_id)
            else:
                self._turns_since_fair += 1
        self._served = self._running.get(request_id)
        self._charge(self._served, took_s)

    def _charge(self, served: _Running | None, took_s: float) -> None:
        for running in self._running.values():
            if running is not served and (running.paused is not None or _is_shorter(served, running)):
                running.owed_s += took_s / (self._fair_every - 1)
        if served is not None:
            served.owed_s = max(served.owed_s - took_s, 0.0)

    def _put(self, request_id: str, running: _Running) -> None:
        self._running[request_id] = running
        insort(self._by_tokens_left, (running.tokens_left, running.arrival, request_id))

    def _take(self, request_id: str) -> None:
        running = self._running.pop(request_id)
        place = bisect_left(self._by_tokens_left, (running.tokens_left, running.arrival, request_id))
        del self._by_tokens_left[place]


def _is_shorter(served: _Running | None, waiting: _Running) -> bool:
    return served is not None and is_clearly_less(served.tokens_left, waiting.tokens_left)


def chunks_of(tokens: Span, *, chunk_tokens: int) -> list[Span]:
    """Return the chunks in which `tokens` will be computed, whatever the order between requests."""
    return [
        Span(start, min(start + chunk_tokens, tokens.end)) for start in range(tokens.start, tokens.end, chunk_tokens)
    ]
