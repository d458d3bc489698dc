"""What a request costs on each node, in seconds, in parts that can be read. Pure.

    prefill   wait for the work ahead + fetch what another node has + compute what is left + evenness
    decode    relay what is not resident + room + the steps of its answer
    local     a decode node computes the little that it lacks itself, between the steps of the others, who wait

Two parts are no time of this request but what it takes from others: a token computed here keeps those behind it
waiting (CROWDING), and a node that has worked more than its share lately has less left for the next ones (EVENNESS).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvrelay.core.types import Incarnation, Role
from kvrelay.router.cost import between_tokens_s, compute_s, relay_s

if TYPE_CHECKING:
    from kvrelay.router.fetch import Pull
    from kvrelay.router.fleet import NodeView

OVERTAKING = 4.0  # longer work than so many times a request's own is not ahead of it, see `promised_wait_s`
CROWDING = 1.0  # seconds that others wait, per second of compute
EVICTION = 4.0  # seconds, per second of compute on a node that must throw out as many blocks as it computes
EVENNESS = 0.02  # seconds, per second of recent work more than the node with the least
EXPECTED_OUTPUT_TOKENS = 256  # when a request may generate more than this, expect this


# Each placement makes tens of loads and scores. A frozen dataclass takes several times as long to make as one that is
# not, so they are not; still nobody changes one. With a hash a load may be the default of a field.
@dataclass(slots=True, unsafe_hash=True)
class Load:
    """What this router has on a node now. Newer than the node's heartbeat; the larger of the two counts."""

    requests: int = 0
    tokens: int = 0  # prompt tokens to compute
    pages: int = 0
    # Predicted time of each request's tokens, shortest first.
    works_s: tuple[float, ...] = field(default=(), compare=False)
    recent_s: float = field(default=0.0, compare=False)  # work given to the node lately, fading
    context: int = field(default=0, compare=False)  # tokens that the requests will have in a decode step
    fetches: tuple[int, ...] = field(default=(), compare=False)  # tokens of each fetch in flight from the node
    turn: int = field(default=0, compare=False)  # number of this router's latest request here; 0 = none yet


NO_LOAD = Load()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything that a placement depends on, besides the nodes."""

    prompt_tokens: int
    total_tokens: int  # prompt and longest output
    needs_decode: bool
    long_prompt_tokens: int  # from where a ring pays, for nodes that do not say
    cached_tokens: Mapping[Incarnation, int] = field(default_factory=dict)  # of the prompt, per node that has any
    loads: Mapping[Incarnation, Load] = field(default_factory=dict)
    held_tokens: Mapping[Incarnation, int] | None = None  # of these, not only on their way; None = all
    host_tokens: Mapping[Incarnation, int] = field(default_factory=dict)  # per prefill node, in its pool or host memory
    avoid: frozenset[Incarnation] = frozenset()
    no_pull: frozenset[Incarnation] = frozenset()  # nodes that lately gave nothing of what they were said to have
    usual_link_s: float = 0.0  # per relayed token, between nodes that have not met; 0 = no link was measured yet

    def usable(self, node: NodeView) -> int:
        """Return the prompt tokens that a node need not compute or get: whole pages, never the last token."""
        cached = self.cached_tokens.get(node.incarnation)
        if not cached:
            return 0
        return min(cached, self.prompt_tokens - 1) // node.page_tokens * node.page_tokens

    def held(self, node: NodeView) -> int:
        """Return the prompt tokens that a node has now, and could hand out."""
        held = self.cached_tokens if self.held_tokens is None else self.held_tokens
        return held.get(node.incarnation, 0)

    def remaining(self, node: NodeView) -> int:
        return self.prompt_tokens - self.usable(node)

    def link_s(self, writer: NodeView, reader: NodeView) -> float:
        """Return the time per relayed token between two nodes; 0 when no link was measured yet."""
        return writer.links.get(reader.incarnation.name) or writer.other_link_s or self.usual_link_s

    def load(self, node: NodeView) -> Load:
        return self.loads.get(node.incarnation, NO_LOAD)

    def pages(self, node: NodeView) -> int:
        """Return the pages that the request takes of a node."""
        num_tokens = self.prompt_tokens if node.role is Role.PREFILL else self.total_tokens
        return -(-num_tokens // node.page_tokens)

    @property
    def expected_output(self) -> int:
        return min(self.total_tokens - self.prompt_tokens, EXPECTED_OUTPUT_TOKENS)

    @property
    def context_tokens(self) -> int:
        """What a decode step will have to read of this request."""
        return self.prompt_tokens + self.expected_output


@dataclass(slots=True)  # see `Load`
class Score:
    """One node's cost of one request, in seconds, by part."""

    node: NodeView
    parts: Mapping[str, float]
    total_s: float
    must_evict: bool = False
    step_s: float = 0.0  # between tokens with the request
    local_tokens: int = 0  # of the prompt, that a decode node computes itself

    @property
    def order(self) -> tuple[bool, float, int, str]:
        """Sorts best first. Scores closer than a microsecond are equal; then the larger ring, then the name."""
        return self.must_evict, round(self.total_s, 6), -self.node.ring_size, self.node.incarnation.name


def work_s(node: NodeView, question: Question, *, cached: int | None = None) -> float:
    """Return the time that the prefill of a request takes on a node by itself; `cached`: if it had so many tokens."""
    cached = question.usable(node) if cached is None else cached
    return compute_s(
        node.cost,
        tokens=question.prompt_tokens - cached,
        cached=cached,
        ring_size=node.ring_size,
        break_even_tokens=question.long_prompt_tokens,
    )


def wait_s(node: NodeView, load: Load, compute: float) -> float:
    """Return how long a request that takes `compute` seconds waits on a prefill node.

    Nodes compute the request with the fewest tokens left first, so of what we gave it only shorter ones are ahead, and
    of longer ones the chunk in work and now and then a fair turn. Work that only the node told of counts whole.
    """
    works_s = load.works_s
    num_shorter = bisect_left(works_s, compute)
    ahead = sum(works_s[:num_shorter]) + (len(works_s) - num_shorter) * compute
    queued_s = max(node.queued_tokens, load.tokens) * node.cost.token_s / node.ring_size
    return ahead + max(0.0, queued_s - sum(works_s))


def backlog_s(node: NodeView, load: Load) -> float:
    """Return how long all work ahead on a prefill node takes."""
    queued_s = max(node.queued_tokens, load.tokens) * node.cost.token_s / node.ring_size
    return max(sum(load.works_s), queued_s)


def promised_wait_s(node: NodeView, load: Load, compute: float) -> float:
    """Return the wait that admission reckons with for a request that takes `compute` seconds on a prefill node.

    More than `wait_s`, since shorter requests will go on to come in and to overtake; less than all work ahead, since
    nodes compute what is shorter first: beside a prompt of minutes one of milliseconds hardly waits.
    """
    return wait_s(node, load, OVERTAKING * compute)


def prefill_score(
    node: NodeView, load: Load, question: Question, *, least_recent_s: float = 0.0, pull: Pull | None = None
) -> Score:
    """Return the cost of a prompt on a prefill node; `pull`: what it had best fetch, counted when that pays."""
    alone = compute = work_s(node, question)
    fetch: dict[str, float] = {}
    if pull is not None and pull.pays:
        compute -= pull.saved_s
        fetch = {"host_s" if pull.source is node else "fetch_s": pull.transfer_s - pull.shared_s}
        if pull.shared_s:
            fetch["fetch_shared_s"] = pull.shared_s
    parts = {
        "wait_s": wait_s(node, load, compute),
        **fetch,
        "compute_s": compute,
        "crowding_s": CROWDING * compute,
        # What is fetched takes as much room as what is computed.
        "eviction_s": EVICTION * alone if node.free_pages < question.pages(node) else 0.0,
        "evenness_s": EVENNESS * (load.recent_s - least_recent_s),
    }
    return Score(node, parts, sum(parts.values()))


def decode_score(node: NodeView, question: Question) -> Score:
    load = question.load(node)
    active = max(node.active_requests, load.requests)
    # Requests that only the node told of are taken to be like this one.
    context = load.context + (active + 1 - load.requests) * question.context_tokens
    step = between_tokens_s(node.cost, sequences=active + 1, context_tokens=context, max_batch=node.max_batch)
    parts = {
        "relay_s": relay_s(node.cost, tokens=question.remaining(node), ring_size=1),
        "steps_s": question.expected_output * step,
    }
    must_evict = node.free_pages - load.pages < question.pages(node)
    return Score(node, parts, sum(parts.values()), must_evict, step)


def further_link_s(prefill: NodeView, decode: NodeView, question: Question) -> float:
    """Return how much longer the hand-off takes on this link than the decode node's score has it."""
    if not question.usual_link_s:
        return 0.0
    return question.remaining(decode) * (question.link_s(prefill, decode) - decode.cost.relay_token_s)


def local_score(node: NodeView, question: Question, *, prefill: NodeView) -> Score | None:
    """Return the cost of a request whose prompt a decode node completes itself; None when too much is missing.

    Args:
        prefill: a node of the same model; its speed stands for that of a decode node that has not measured its own.
    """
    last_block = (question.prompt_tokens - 1) // node.block_tokens * node.block_tokens
    cached = min(question.cached_tokens.get(node.incarnation, 0), last_block)
    tokens = question.prompt_tokens - cached
    if not cached or tokens > node.local_tokens:
        return None
    load, handed_over = question.load(node), decode_score(node, question)
    cost = node.cost if node.cost.is_measured_local else prefill.cost
    compute = compute_s(cost, tokens=tokens, cached=cached, ring_size=1, break_even_tokens=1)
    active = max(node.active_requests, load.requests)
    parts = {
        "wait_s": sum(load.works_s),
        "compute_s": compute,
        "crowding_s": CROWDING * compute * active,
        "steps_s": handed_over.parts["steps_s"],
    }
    return Score(node, parts, sum(parts.values()), handed_over.must_evict, handed_over.step_s, local_tokens=tokens)
