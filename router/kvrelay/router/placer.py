"""From a prompt to a pair of nodes: asks the index, adds what is on its way, lets placement decide, keeps the books."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.errors import OverloadedError
from kvrelay.core.types import Incarnation, Tier
from kvrelay.index.lookup import Lookup
from kvrelay.index.reader import Confidence, Match
from kvrelay.router.admission import Prospect, Terms, judge
from kvrelay.router.books import Books, Entry, Share
from kvrelay.router.decisions import Decision, DecisionLog, explained
from kvrelay.router.fetch import Pull
from kvrelay.router.fleet import FleetView, NodeView
from kvrelay.router.learned import Learned
from kvrelay.router.load_columns import LoadColumns
from kvrelay.router.peers import Placed, PullFrom
from kvrelay.router.placement import Pair, Question
from kvrelay.router.prompt_hashes import hashes_by_layout, seed_of
from kvrelay.router.replicas import together
from kvrelay.router.score import work_s
from kvrelay.router.shortlist import Roster
from kvrelay.router.tenants import calling
from kvrelay.router.turnstile import Turnstile

LEAST_OBSERVED_TOKENS = 256  # in shorter prefills the messages between the processes weigh too much
_OUTPUT_WEIGHT = 2.0
NO_PULL_S = 10.0  # a node that gave nothing is asked again after this: it has evicted it, or cannot be reached
_SURENESS = (Confidence.EXACT, Confidence.DEGRADED, Confidence.FALLBACK)


@dataclass(frozen=True, slots=True)
class _Work:
    """What is to be placed."""

    prompt_tokens: int
    max_tokens: int
    needs_decode: bool
    avoid: frozenset[Incarnation]
    hashes: Mapping[bytes, list[bytes]]  # of its blocks, by page layout


@dataclass(slots=True)
class _Cached:
    """Prompt tokens by node, and how sure that is."""

    held: dict[Incarnation, int] = field(default_factory=dict)  # in its pool
    cached: dict[Incarnation, int] = field(default_factory=dict)  # in its pool, or on their way there
    in_host: dict[Incarnation, int] = field(default_factory=dict)  # in its pool or the host memory behind it
    confidence: Confidence = Confidence.EXACT


@dataclass(frozen=True, slots=True)
class _Choice:
    """Where it would go now."""

    pair: Pair
    question: Question
    confidence: Confidence


class IndexPlacer:
    """Places requests over the fleet as it is now. Implements `peers.Placer`."""

    def __init__(
        self,
        fleet: FleetView,
        index: Lookup,
        *,
        long_prompt_tokens: int,
        max_waiting: int = 1024,
        ahead_per_node: int | None = None,
        others: Callable[[], LoadColumns] = LoadColumns,
        on_placed: Callable[[], None] = lambda: None,
        clock: Clock = monotonic,
    ) -> None:
        """
        Args:
            max_waiting: most requests whose prompt is not computed yet; more are refused.
            ahead_per_node: requests that a prefill node may have to compute; more wait for their tenant's turn.
                None = all go to the nodes at once.
            others: returns what other routers have placed on each node.
            on_placed: called after each placement.
        """
        self._fleet = fleet
        self._index = index
        self._long_prompt_tokens = long_prompt_tokens
        self._max_waiting = max_waiting
        self._ahead_per_node = ahead_per_node
        self._turnstile = Turnstile(self._most_on_nodes)  # not used when all go to the nodes at once
        self._others = others
        self._on_placed = on_placed
        self._clock = clock
        self._books = Books(clock)
        self._learned = Learned(clock)
        self._seen: Sequence[NodeView] = ()  # the nodes that the roster was made of
        self._roster = Roster(())
        self._entries: dict[int, Entry] = {}  # by identity of the Placed that was given out
        self._decided: dict[int, tuple[_Work, _Choice]] = {}
        self._no_pull_until_s: dict[Incarnation, float] = {}
        self.decisions = DecisionLog()

    def own_loads(self) -> LoadColumns:
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
        hashes = await hashes_by_layout(self._fleet.nodes(), token_ids)
        work = _Work(len(token_ids), max_tokens, needs_decode, avoid, hashes)
        choice = await self._choose(work)
        self.decisions.confidences[choice.confidence] += 1
        passed = None
        if terms is not None:
            self._admit(choice.pair, terms)
            if self._ahead_per_node is not None:
                passed = await self._turnstile.turn(calling.get(), _tokens_of(choice))
        try:
            if passed is not None and passed.waited:  # what the nodes have and hold is another matter by now
                choice = await self._choose(work)
            return self._enter(work, choice, on_computed=passed.end if passed else lambda: None)
        except BaseException:
            if passed is not None:
                passed.end()
            raise

    async def preview(self, *, token_ids: npt.NDArray[np.int32], max_tokens: int) -> Decision:
        """Return where a prompt would go now, and why. Nothing is entered.

        Raises:
            InvalidRequestError, UnavailableError: as `place`.
        """
        hashes = await hashes_by_layout(self._fleet.nodes(), token_ids)
        work = _Work(len(token_ids), max_tokens, max_tokens > 1, frozenset(), hashes)
        return _explained(work, await self._choose(work))

    async def _choose(self, work: _Work) -> _Choice:
        known = await self._cached(work.hashes)
        loads, others = self._books.loads(), self._others()
        question = Question(
            prompt_tokens=work.prompt_tokens,
            total_tokens=work.prompt_tokens + work.max_tokens,
            needs_decode=work.needs_decode,
            long_prompt_tokens=self._long_prompt_tokens,
            cached_tokens=known.cached,
            held_tokens=known.held,
            host_tokens=known.in_host,
            loads=together(loads, others),
            avoid=work.avoid,
            no_pull=self._no_pull(),
            usual_link_s=self._fleet.usual_link_s,
        )
        roster = self._present()
        if not roster.block_tokens.keys() <= work.hashes.keys():
            # A layout that came up just now has no hashes yet; its nodes take part from the next request on.
            roster = Roster([node for node in roster.nodes if node.layout_fingerprint in work.hashes])
        return _Choice(roster.place(question, [loads, others] if others else [loads]), question, known.confidence)

    def prepare(self) -> None:
        """Make ready what every placement needs of the nodes as they are now."""
        self._present().prepare()

    def _present(self) -> Roster:
        """Return the nodes as they are now, with costs as they have shown themselves to be."""
        nodes = self._fleet.nodes()
        if nodes is not self._seen:
            self._seen, self._roster = nodes, Roster(self._learned.corrected(nodes))
        return self._roster

    def _enter(self, work: _Work, choice: _Choice, *, on_computed: Callable[[], None]) -> Placed:
        pair, question = choice.pair, choice.question
        decode_pages = 0 if pair.decode is None else question.pages(pair.decode)
        hashes = work.hashes[pair.prefill.layout_fingerprint]
        entry = self._books.enter(
            pair,
            decode_pages=decode_pages,
            hashes=hashes,
            context=question.context_tokens,
            on_computed=on_computed,
        )
        self._on_placed()
        pull = pair.pull or pair.late_pull
        placed = Placed(
            pair.prefill,
            pair.decode,
            seed_of(pair.prefill),
            choice.confidence,
            lambda: self._release(entry),
            is_local=pair.local is not None,
            pull_from=None if pull is None else PullFrom(pull.source, pull.upto),
            handed_over=lambda: self._books.replan(entry, _all_by_prefill(choice, decode_pages)),
            begun=entry.fetched,
            not_pulled=lambda: self._not_pulled(entry, choice, decode_pages, pull),
        )
        return self._given_out(placed, entry, (work, choice))

    def _not_pulled(self, entry: Entry, choice: _Choice, decode_pages: int, pull: Pull | None) -> None:
        assert pull is not None
        self._no_pull_until_s[pull.source.incarnation] = self._clock() + NO_PULL_S
        self._books.replan(entry, _all_by_prefill(choice, decode_pages))

    def _no_pull(self) -> frozenset[Incarnation]:
        if self._no_pull_until_s:
            now_s = self._clock()
            self._no_pull_until_s = {one: until_s for one, until_s in self._no_pull_until_s.items() if until_s > now_s}
        return frozenset(self._no_pull_until_s)

    def _admit(self, pair: Pair, terms: Terms) -> None:
        tenant, cost = calling.get(), pair.prefill.cost
        nodes = self._present().num_prefill
        queued_s = self._turnstile.tokens_ahead(tenant) * cost.token_s / pair.prefill.ring_size / max(1, nodes)
        prospect = Prospect(
            wait_s=pair.backlog_s() + queued_s,
            compute_s=pair.work_s,
            step_s=pair.step_s() if pair.decode is not None and pair.decode.cost.is_believed else 0.0,
            is_proven=self._learned.is_proven(pair.prefill.incarnation),
        )
        waiting = self._books.num_waiting + self._turnstile.num_waiting
        refusal = judge(prospect, terms, waiting=waiting, max_waiting=self._max_waiting)
        if refusal is not None:
            raise OverloadedError(refusal.reason, retry_after_s=refusal.retry_after_s)

    def _most_on_nodes(self) -> int:
        assert self._ahead_per_node is not None, "else nobody waits for a turn"
        return self._ahead_per_node * self._present().num_prefill

    def named(self, placed: Placed, request_id: str) -> None:
        """Enter the decision of a placed request into the log."""
        if (decided := self._decided.get(id(placed))) is not None:
            self.decisions.enter(request_id, _explained(*decided))

    def computed(self, placed: Placed) -> None:
        """Say that the prompt of a placed request is computed: it is no work ahead any more."""
        entry = self._entries.get(id(placed))
        if entry is None or entry.is_computed:
            return
        is_usual = not placed.is_local and placed.pull_from is None
        if is_usual and entry.is_alone and entry.shares[0].tokens >= LEAST_OBSERVED_TOKENS:
            share = entry.shares[0]
            took_s = self._clock() - entry.entered_s
            self._observe(share.node, predicted_s=share.work_s, took_s=took_s)
        entry.computed()

    def _observe(self, name: Incarnation, *, predicted_s: float, took_s: float) -> None:
        self._learned.observe_prefill(name, predicted_s=predicted_s, observed_s=took_s)
        if (row := self._roster.row.get(name)) is not None:
            self._roster.update(self._learned.correct(self._seen[row]))

    def _given_out(self, placed: Placed, entry: Entry, decided: tuple[_Work, _Choice]) -> Placed:
        entry.key = id(placed)
        self._entries[entry.key] = entry
        self._decided[entry.key] = decided
        return placed

    def _release(self, entry: Entry) -> None:
        if not entry.is_released:
            entry.release()
            del self._entries[entry.key], self._decided[entry.key]

    async def _cached(self, hashes: Mapping[bytes, list[bytes]]) -> _Cached:
        """Return what the nodes have of a prompt."""
        found = _Cached()
        for layout, of_prompt in hashes.items():
            match = await self._index.longest(of_prompt)
            block_tokens = self._present().block_tokens.get(layout, {})
            sureness = _judged(match, block_tokens.keys())
            found.confidence = max(found.confidence, sureness, key=_SURENESS.index)
            blocks = {one.node: one.num_blocks for one in match.holdings if one.num_blocks and one.tier is Tier.DEVICE}
            in_host = {one.node: one.num_blocks for one in match.holdings if one.num_blocks and one.tier is Tier.HOST}
            found.held |= _in_tokens(blocks, block_tokens)
            found.in_host |= _in_tokens(in_host, block_tokens)
            for holder, count in self._books.tentative_blocks(of_prompt):
                if count > blocks.get(holder, 0):
                    blocks[holder] = count
            found.cached |= _in_tokens(blocks, block_tokens)
        return found


def _in_tokens(blocks: Mapping[Incarnation, int], block_tokens: Mapping[Incarnation, int]) -> dict[Incarnation, int]:
    """Return tokens by node, of the nodes that are there."""
    return {one: count * block_tokens[one] for one, count in blocks.items() if one in block_tokens}


def _all_by_prefill(choice: _Choice, decode_pages: int) -> tuple[Share, ...]:
    """Return what a request takes of its pair when the prefill node computes all that it has not cached."""
    pair, question = choice.pair, choice.question
    first = Share(pair.prefill.incarnation, question.remaining(pair.prefill), work_s=work_s(pair.prefill, question))
    if pair.decode is None:
        return (first,)
    return first, Share(pair.decode.incarnation, pages=decode_pages, context=question.context_tokens)


def _explained(work: _Work, choice: _Choice) -> Decision:
    cached = {node.name: tokens for node, tokens in choice.question.cached_tokens.items()}
    return explained(choice.pair, prompt_tokens=work.prompt_tokens, confidence=choice.confidence, cached=cached)


def _tokens_of(choice: _Choice) -> float:
    """Return what a request costs its tenant: a token of the answer as much as several of the prompt."""
    return choice.pair.remaining_tokens + _OUTPUT_WEIGHT * choice.question.expected_output


def _judged(match: Match, nodes: AbstractSet[Incarnation]) -> Confidence:
    """Return how sure an answer is, given who is there: an index that does not know all nodes has lost something."""
    if match.confidence is Confidence.EXACT and nodes - {one.node for one in match.holdings}:
        return Confidence.DEGRADED
    return match.confidence
