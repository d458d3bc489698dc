"""What a prefill node had best fetch of a prompt instead of computing it, and from which node. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvrelay.core.types import LOAD_START_S, Role
from kvrelay.router.score import Question, backlog_s, work_s

if TYPE_CHECKING:
    from kvrelay.router.fleet import NodeView

PULL_START_S = 0.01  # of a pull, whatever its size: calls and checks between two processes
MOST_SOURCES = 8  # that are looked at; a prompt that all nodes begin with has as many
# A prefill node that computes begins with its next step, and sends between the layers of that one.
_STEPS_AWAITED = 1.5


@dataclass(frozen=True, slots=True)
class Pull:
    """Tokens of a prompt that a prefill node might fetch instead of computing them."""

    source: NodeView  # the prefill node itself: from its host memory
    upto: int  # the source has the prompt's first so many tokens
    tokens: int  # of these, the prefill node lacks
    transfer_s: float
    saved_s: float  # of computation
    shared_s: float = 0.0  # of transfer_s: what other fetches from the source take of its link meanwhile
    num_others: int = 0  # such fetches

    @property
    def pays(self) -> bool:
        return self.transfer_s < self.saved_s

    def said_s(self) -> str:
        """Return the time of the transfer in words."""
        others = f", {self.shared_s:.3g} s of it by other fetches from there ({self.num_others})"
        return f"{self.transfer_s:.3g} s{others if self.num_others else ''}"


def sources_of(nodes: Sequence[NodeView], question: Question) -> Mapping[bytes, Sequence[NodeView]]:
    """Return the nodes of each page layout that have most of a prompt, and of those the ones with the least to do;
    nothing when nobody fetches."""
    if not any(node.pulls for node in nodes):
        return {}
    by_layout: dict[bytes, list[NodeView]] = {}
    for node in nodes:
        asked = node.incarnation not in question.avoid and node.incarnation not in question.no_pull
        if asked and question.held(node):
            by_layout.setdefault(node.layout_fingerprint, []).append(node)
    return {
        layout: heapq.nsmallest(
            MOST_SOURCES, found, key=lambda one: (-question.held(one), one.queued_tokens, one.incarnation.name)
        )
        for layout, found in by_layout.items()
    }


def best_pull(
    prefill: NodeView, question: Question, sources: Sequence[NodeView], *, most: int | None = None
) -> Pull | None:
    """Return what a prefill node had best fetch of a prompt, from another node or from its own host memory; None when
    it cannot, or nobody has more than its pool.

    Args:
        sources: of its page layout; see `sources_of`.
        most: no more than the prompt's first so many tokens; None = all whole blocks.
    """
    if not question.host_tokens and not (prefill.pulls and sources):
        return None
    best = host_load(prefill, question)
    have, last_block = question.usable(prefill), (question.prompt_tokens - 1) // prefill.block_tokens
    if most is not None:
        last_block = min(last_block, most // prefill.block_tokens)
    saved_s: dict[int, float] = {}  # by what a source has: of many, most have the same
    for node in sources if prefill.pulls else ():
        upto = min(question.held(node), last_block * prefill.block_tokens)
        if upto <= have or node.incarnation == prefill.incarnation:
            continue
        others = question.load(node).fetches
        shared, on_link_s = shared_tokens(upto - have, others), token_s(node, prefill, question)
        transfer = start_s(node, question) + (upto - have + shared) * on_link_s
        if upto not in saved_s:
            saved_s[upto] = work_s(prefill, question) - work_s(prefill, question, cached=upto)
        saved = saved_s[upto]
        if best is None or saved - transfer > best.saved_s - best.transfer_s:
            best = Pull(node, upto, upto - have, transfer, saved, shared * on_link_s, len(others))
    return best


def host_load(prefill: NodeView, question: Question) -> Pull | None:
    """Return what a prefill node could load from its host memory; None when there is nothing."""
    have, last_block = question.usable(prefill), (question.prompt_tokens - 1) // prefill.block_tokens
    upto = min(question.host_tokens.get(prefill.incarnation, 0), last_block * prefill.block_tokens)
    if upto <= have:
        return None
    saved = work_s(prefill, question) - work_s(prefill, question, cached=upto)
    return Pull(prefill, upto, upto - have, LOAD_START_S + (upto - have) * prefill.host_token_s, saved)


def late_pull(prefill: NodeView, question: Question, sources: Sequence[NodeView]) -> Pull | None:
    """Return what a prefill node should fetch if it finds that what counts as on its way to it is not even begun; None
    when nothing is, or computing is faster. Requests may overtake the one that was to fetch or compute it.

    What others have behind that is not fetched with it: whether that pays is decided by itself.
    """
    on_way = question.usable(prefill)
    if question.held_tokens is None or question.held(prefill) >= on_way:
        return None
    without = replace(question, cached_tokens=question.held_tokens, host_tokens={})
    pull = best_pull(prefill, without, sources, most=on_way)
    return pull if pull is not None and pull.pays else None


def start_s(source: NodeView, question: Question) -> float:
    """Return how long a fetch takes besides its bytes: a prefill node that is busy lets it wait for its next step."""
    if source.role is Role.DECODE:
        return PULL_START_S
    step_s = source.chunk_tokens * source.cost.token_s / source.ring_size
    return PULL_START_S + min(backlog_s(source, question.load(source)), _STEPS_AWAITED * step_s)


def shared_tokens(tokens: int, others: Iterable[int]) -> int:
    """Return what the link of a source carries of other fetches before one of so many tokens is over: all have equal
    parts of it, so of each other one as much, or all that it has."""
    return sum(min(tokens, other) for other in others)


def token_s(source: NodeView, prefill: NodeView, question: Question) -> float:
    """Return the time of one token on the link between two nodes."""
    return question.link_s(source, prefill) or source.cost.relay_token_s


def usual_token_s(source: NodeView, question: Question) -> float:
    """Return the time of one token on a link of a node that is not listed."""
    return source.other_link_s or question.usual_link_s or source.cost.relay_token_s
