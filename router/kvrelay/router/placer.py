"""From a prompt to a pair of nodes: asks the index, adds what is on its way, lets placement decide, keeps the books."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

from kvrelay.core import prefix_hash
from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.errors import OverloadedError
from kvrelay.core.types import Incarnation
from kvrelay.index.lookup import Lookup
from kvrelay.index.reader import Confidence, Match
from kvrelay.router.admission import Prospect, Terms, judge
from kvrelay.router.books import Books, Entry
from kvrelay.router.decisions import Decision, DecisionLog, explained
from kvrelay.router.fleet import FleetView, NodeView
from kvrelay.router.learned import Learned
from kvrelay.router.peers import Placed
from kvrelay.router.placement import Load, Pair, Question, place
from kvrelay.router.replicas import together
from kvrelay.router.tenants import calling

LEAST_OBSERVED_TOKENS = 256  # in shorter prefills the messages between the processes weigh too much
_SURENESS = (Confidence.EXACT, Confidence.DEGRADED, Confidence.FALLBACK)


class IndexPlacer:
    """Places requests over the fleet as it is now. Implements `peers.Placer`."""

    def __init__(
        self,
        fleet: FleetView,
        index: Lookup,
        *,
        long_prompt_tokens: int,
        max_waiting: int = 1024,
        others: Callable[[], Mapping[Incarnation, Load]] = dict,
        on_placed: Callable[[], None] = lambda: None,
        clock: Clock = monotonic,
    ) -> None:
        """
        Args:
            max_waiting: most requests whose prompt is not computed yet; more are refused.
            others: returns what other routers have placed on each node.
            on_placed: called after each placement.
        """
        self._fleet = fleet
        self._index = index
        self._long_prompt_tokens = long_prompt_tokens
        self._max_waiting = max_waiting
        self._others = others
        self._on_placed = on_placed
        self._clock = clock
        self._books = Books(clock)
        self._learned = Learned()
        self._entries: dict[int, Entry] = {}  # by identity of the Placed that was given out
        self._decided: dict[int, Decision] = {}
        self.decisions = DecisionLog()

    def own_loads(self) -> Mapping[Incarnation, Load]:
        """Return what this router has placed on each node."""
        return self._books.loads()

    async def place(
        self,
        *,
        token_ids: npt.NDArray[np.int32],
        max_tokens: int,
        needs_decode: bool,
        avoid: frozenset[Incarnation],
        terms: Terms | None = None,
    ) -> Placed:
        """Choose nodes for a prompt.

        Raises:
            InvalidRequestError: no node could ever hold it.
            UnavailableError: no node can take it now.
            OverloadedError: it would not be kept to its terms.
        """
        nodes = self._learned.corrected(self._fleet.nodes())
        hashes, cached, confidence = await self._cached(nodes, token_ids)
        question = Question(
            prompt_tokens=len(token_ids),
            total_tokens=len(token_ids) + max_tokens,
            needs_decode=needs_decode,
            long_prompt_tokens=self._long_prompt_tokens,
            cached_tokens=cached,
            loads=together(self._books.loads(), self._others()),
            avoid=avoid,
        )
        self.decisions.confidences[confidence] += 1
        pair = place(nodes, question)
        if terms is not None:
            self._admit(pair, terms)
        decode_pages = 0 if pair.decode is None else question.pages(pair.decode)
        entry = self._books.enter(pair, decode_pages=decode_pages, hashes=hashes[pair.prefill.layout_fingerprint])
        self._on_placed()
        placed = Placed(pair.prefill, pair.decode, _seed(pair.prefill), confidence, entry.release)
        names = {node.name: tokens for node, tokens in cached.items()}
        decision = explained(pair, prompt_tokens=len(token_ids), confidence=confidence, cached=names)
        return self._given_out(placed, entry, decision)

    def _admit(self, pair: Pair, terms: Terms) -> None:
        prospect = Prospect(
            wait_s=pair.backlog_s(),
            compute_s=pair.work_s,
            step_s=0.0,  # of decode nodes nobody has said or seen how fast they are
            is_proven=self._learned.is_proven(pair.prefill.incarnation),
        )
        refusal = judge(prospect, terms, waiting=self._books.num_waiting, max_waiting=self._max_waiting)
        if refusal is not None:
            raise OverloadedError(refusal.reason, retry_after_s=refusal.retry_after_s)

    def named(self, placed: Placed, request_id: str) -> None:
        """Enter the decision of a placed request into the log."""
        if (decision := self._decided.get(id(placed))) is not None:
            self.decisions.enter(request_id, decision)

    def computed(self, placed: Placed) -> None:
        """Say that the prompt of a placed request is computed: it is no work ahead any more."""
        entry = self._entries.get(id(placed))
        if entry is None or entry.is_computed:
            return
        if entry.is_alone and entry.shares[0].tokens >= LEAST_OBSERVED_TOKENS:
            share = entry.shares[0]
            took_s = self._clock() - entry.entered_s
            self._learned.observe_prefill(share.node, predicted_s=share.work_s, observed_s=took_s)
        entry.computed()

    def _given_out(self, placed: Placed, entry: Entry, decision: Decision) -> Placed:
        self._entries = {key: one for key, one in self._entries.items() if not one.is_released}
        self._decided = {key: one for key, one in self._decided.items() if key in self._entries}
        self._entries[id(placed)] = entry
        self._decided[id(placed)] = decision
        return placed

    async def _cached(
        self, nodes: tuple[NodeView, ...], token_ids: npt.NDArray[np.int32]
    ) -> tuple[dict[bytes, list[bytes]], dict[Incarnation, int], Confidence]:
        """Return block hashes by layout, cached tokens by node, and how sure they are."""
        hashes: dict[bytes, list[bytes]] = {}
        cached: dict[Incarnation, int] = {}
        confidence = Confidence.EXACT
        for layout, node in {node.layout_fingerprint: node for node in nodes}.items():
            # In a thread: a million tokens take long enough to be felt by every other stream.
            hashes[layout] = await asyncio.to_thread(_hashes, node, token_ids)
            match = await self._index.longest(hashes[layout])
            of_layout = {one.incarnation for one in nodes if one.layout_fingerprint == layout}
            confidence = max(confidence, _judged(match, of_layout), key=_SURENESS.index)
            blocks = {one.node: one.num_blocks for one in match.holdings}
            for holder, count in self._books.tentative_blocks(hashes[layout]).items():
                blocks[holder] = max(count, blocks.get(holder, 0))
            cached |= {one: count * node.block_tokens for one, count in blocks.items() if one in of_layout}
        return hashes, cached, confidence


def _seed(node: NodeView) -> bytes:
    return prefix_hash.seed(fingerprint=node.layout_fingerprint, tenant_salt=calling.get().salt)


def _hashes(node: NodeView, token_ids: npt.NDArray[np.int32]) -> list[bytes]:
    return prefix_hash.chain(_seed(node), token_ids, block_tokens=node.block_tokens)


def _judged(match: Match, nodes: AbstractSet[Incarnation]) -> Confidence:
    """Return how sure an answer is, given who is there: an index that does not know all nodes has lost something."""
    if match.confidence is Confidence.EXACT and nodes - {one.node for one in match.holdings}:
        return Confidence.DEGRADED
    return match.confidence
