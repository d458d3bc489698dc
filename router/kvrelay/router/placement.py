"""Which nodes serve a request: filter, score, pick. Pure; every node that is left out or loses has a reason.

Prefill and decode are chosen together: both of one page layout, by the sum of their costs and of the link between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from kvrelay.core.errors import InvalidRequestError, UnavailableError
from kvrelay.core.types import Role
from kvrelay.router import sharing
from kvrelay.router.fetch import best_pull, late_pull, sources_of
from kvrelay.router.pair import Pair
from kvrelay.router.score import (
    NO_LOAD,
    Load,
    Question,
    Score,
    decode_score,
    further_link_s,
    local_score,
    prefill_score,
    work_s,
)
from kvrelay.router.sharing import Turn

if TYPE_CHECKING:
    from kvrelay.router.fleet import NodeView

__all__ = [
    "NO_LOAD",
    "Candidates",
    "Load",
    "Pair",
    "Question",
    "Service",
    "longest_served",
    "missing_for_service",
    "pick",
    "place",
    "refusal",
    "usable_groups",
]

_JOINT = 8  # of each role, the best so many are tried in every combination
_ORDER = attrgetter("order")  # of a score


def usable_groups(nodes: Iterable[NodeView]) -> list[list[NodeView]]:
    """Return the nodes of each page layout that has both a prefill and a decode node."""
    groups: dict[bytes, list[NodeView]] = {}
    for node in nodes:
        groups.setdefault(node.layout_fingerprint, []).append(node)
    return [group for group in groups.values() if {node.role for node in group} == set(Role)]


def missing_for_service(nodes: Sequence[NodeView]) -> str | None:
    """Return what the nodes lack to serve anything, or None."""
    absent = [role.value for role in Role if not any(node.role is role for node in nodes)]
    if absent:
        return f"no {' and no '.join(absent)} node takes requests"
    return None if usable_groups(nodes) else "no prefill and decode node have the same page layout"


def longest_served(nodes: Iterable[NodeView]) -> int:
    """Return the longest prompt plus output that some usable pair takes; 0 without a pair."""
    per_group = (
        min(max(node.max_model_len for node in group if node.role is role) for role in Role)
        for group in usable_groups(nodes)
    )
    return max(per_group, default=0)


@dataclass(frozen=True, slots=True)
class Service:
    """What some nodes can do together."""

    missing: str | None  # what they lack to serve anything
    max_model_len: int  # see `longest_served`

    @classmethod
    def of(cls, nodes: Sequence[NodeView]) -> Service:
        return cls(missing_for_service(nodes), longest_served(nodes))


@dataclass(frozen=True, slots=True)
class Candidates:
    """The nodes of one page layout that can take a request, with what it would cost there."""

    prefills: Sequence[Score]  # best first
    decodes: Sequence[Score]  # best first; none when nothing is to be decoded
    near: Sequence[NodeView]  # decode nodes that might complete the prompt themselves
    whose_turn: Callable[[NodeView, Score], Turn]  # see `sharing.whose_turn`, from prefill node and best decode node


def place(
    nodes: Sequence[NodeView], question: Question, *, sources: Mapping[bytes, Sequence[NodeView]] | None = None
) -> Pair:
    """Choose the prefill and the decode node of a request together: both of one layout.

    Args:
        sources: nodes that prefill may fetch cached tokens from, see `fetch.sources_of`; None = those among `nodes`.

    Raises:
        InvalidRequestError: no node could ever hold the request; names the pages.
        UnavailableError: no node can take it now; names every node and why not.
    """
    refused = {node.incarnation.name: why for node in nodes if (why := refusal(node, question)) is not None}
    groups: dict[bytes, tuple[list[NodeView], list[NodeView]]] = {}
    for node in nodes:
        if node.incarnation.name not in refused:
            both = groups.setdefault(node.layout_fingerprint, ([], []))
            both[node.role is Role.DECODE].append(node)
    sources = sources_of(nodes, question) if sources is None else sources
    candidates = {
        layout: _candidates(prefills, decodes, question, sources.get(layout, ()))
        for layout, (prefills, decodes) in groups.items()
    }
    pair = pick(candidates, question, sources, refused)
    if pair is None:
        raise _none_left(nodes, question, refused)
    return pair


def _candidates(
    prefills: Sequence[NodeView], decodes: Sequence[NodeView], question: Question, sources: Sequence[NodeView]
) -> Candidates:
    of_decode = [decode_score(node, question) for node in decodes] if question.needs_decode else []
    return Candidates(
        sorted(_prefill_scores(prefills, question, sources), key=_ORDER),
        sorted(of_decode, key=_ORDER),
        [node for node in decodes if node.local_tokens],
        lambda prefill, best: sharing.whose_turn(prefill, best, of_decode, question),
    )


def pick(
    candidates: Mapping[bytes, Candidates],
    question: Question,
    sources: Mapping[bytes, Sequence[NodeView]],
    refused: Mapping[str, str],
) -> Pair | None:
    """Choose among nodes that can take a request, by page layout; None when no layout has both roles.

    Args:
        sources: see `place`.
        refused: the other nodes by name, and why.
    """
    scores = [score for one in candidates.values() for score in (*one.prefills, *one.decodes)]
    choices = {
        layout: _best(one.prefills, one.decodes, question)
        for layout, one in candidates.items()
        if one.prefills and (one.decodes or not question.needs_decode)
    }
    if not choices:
        return None
    prefill, decode = min(choices.values(), key=lambda both: _order(both[0], both[1], question))
    node = prefill.node
    load, remaining, work = question.load(node), question.remaining(node), work_s(node, question)
    if decode is None:
        return _fetched(Pair(node, None, remaining, refused, work, tuple(scores), load=load), question, sources)
    best_step_s = decode.step_s
    turn = candidates[node.layout_fingerprint].whose_turn(node, decode)
    if turn.node is not decode.node:
        known = next((one for one in scores if one.node is turn.node), None)
        decode = known or decode_score(turn.node, question)
        scores += [] if known else [decode]
    handed_s = prefill.total_s + decode.total_s + further_link_s(node, decode.node, question)
    local, way = _best_local(candidates, question, choices, decode, handed_s)
    if local is not None:
        backup, _ = choices[local.node.layout_fingerprint]
        compute = local.parts["compute_s"]
        return Pair(backup.node, local.node, local.local_tokens, refused, compute, tuple(scores), local, way)
    pair = Pair(
        node, decode.node, remaining, refused, work, tuple(scores), way=way,
        load=load, near=turn.near, why_shared=turn.why, best_step_s=best_step_s,
    )  # fmt: skip
    return _fetched(pair, question, sources)


def _fetched(pair: Pair, question: Question, sources: Mapping[bytes, Sequence[NodeView]]) -> Pair:
    """Return a pair whose prefill node fetches something, if that pays; either way it says why."""
    of_layout = sources.get(pair.prefill.layout_fingerprint, ())
    pull = best_pull(pair.prefill, question, of_layout)
    if pull is None or not pull.pays:
        late = late_pull(pair.prefill, question, of_layout)
        pair = pair if late is None else replace(pair, late_pull=late)
    if pull is None:
        return pair
    in_host = pull.source is pair.prefill
    name, saved = pull.source.incarnation.name, f"{pull.saved_s:.3g} s"
    where = "host memory" if in_host else name
    if not pull.pays:
        what = f"{'loading' if in_host else 'fetching'} {pull.tokens} tokens from {where}"
        said = f"{what} would take {pull.said_s()}, computing them {saved}"
        return replace(pair, way="; ".join(filter(None, (pair.way, said))))
    what = f"{name} loads {pull.tokens} tokens from {where}" if in_host else f"pull from {name} {pull.tokens} tokens"
    said = f"{what} in {pull.said_s()}, computing them {saved}"
    return replace(
        pair,
        way="; ".join(filter(None, (pair.way, said))),
        pull=None if in_host else pull,
        remaining_tokens=pair.remaining_tokens - pull.tokens,
        work_s=pair.work_s + pull.transfer_s - pull.saved_s,
    )


def _best_local(
    candidates: Mapping[bytes, Candidates],
    question: Question,
    choices: Mapping[bytes, tuple[Score, Score | None]],
    decode: Score,
    handed_s: float,
) -> tuple[Score | None, str]:
    """Return the decode node that should complete the prompt itself, if one should, and why, or why not.

    Args:
        choices: the best pair of each layout that has one.
        decode, handed_s: of the best one of all.
    """
    found = (
        local_score(node, question, prefill=prefill.node)
        for layout, (prefill, _) in choices.items()
        for node in candidates[layout].near
    )
    best = min((one for one in found if one is not None), key=_ORDER, default=None)
    if best is None:
        return None, "handed over: no decode node has nearly all of the prompt"
    name, tokens = best.node.incarnation.name, best.local_tokens
    if (best.must_evict, best.total_s) < (decode.must_evict, handed_s):
        return (
            best,
            f"{name} computes the last {tokens} tokens itself: {best.total_s:.3g} s, handed over {handed_s:.3g} s",
        )
    return None, f"handed over: {handed_s:.3g} s; {name} could compute {tokens} tokens itself in {best.total_s:.3g} s"


def _prefill_scores(nodes: Sequence[NodeView], question: Question, sources: Sequence[NodeView]) -> list[Score]:
    loads = [question.load(node) for node in nodes]
    least_s = min((load.recent_s for load in loads), default=0.0)
    return [
        prefill_score(node, load, question, least_recent_s=least_s, pull=best_pull(node, question, sources))
        for node, load in zip(nodes, loads, strict=True)
    ]


def _best(prefills: Sequence[Score], decodes: Sequence[Score], question: Question) -> tuple[Score, Score | None]:
    """Return the best pair of some that stand best first. Only the link depends on both, so a few are enough to try."""
    if not decodes or not question.usual_link_s:
        return prefills[0], decodes[0] if decodes else None
    pairs = [
        (decode.must_evict, _together_s(prefill, decode, question), prefill, decode)
        for prefill in prefills[:_JOINT]
        for decode in decodes[:_JOINT]
    ]
    # Rings and names decide between equal costs only; to compare those of each pair takes as long as all the rest.
    least = min(pair[:2] for pair in pairs)
    equal = [pair[2:] for pair in pairs if pair[:2] == least]
    return equal[0] if len(equal) == 1 else min(equal, key=lambda both: _order(both[0], both[1], question))


def _together_s(prefill: Score, decode: Score, question: Question) -> float:
    """Return the cost of a pair; those closer than a microsecond are equal, as in `Score.order`."""
    return round(prefill.total_s + decode.total_s + further_link_s(prefill.node, decode.node, question), 6)


def _order(prefill: Score, decode: Score | None, question: Question) -> tuple[object, ...]:
    if decode is None:
        return prefill.order
    return decode.must_evict, _together_s(prefill, decode, question), *prefill.order[2:], *decode.order[2:]


def refusal(node: NodeView, question: Question) -> str | None:
    """Return why a node cannot take the request, or None."""
    if node.incarnation in question.avoid:
        return "failed this request before"
    if node.draining:
        return "is draining"
    if node.max_model_len < question.total_tokens:
        return f"takes {node.max_model_len} tokens, the request may reach {question.total_tokens}"
    if question.pages(node) > node.total_pages:
        return f"has {node.total_pages} pages, the request needs {question.pages(node)}"
    return None


def _none_left(
    nodes: Sequence[NodeView], question: Question, refused: Mapping[str, str]
) -> InvalidRequestError | UnavailableError:
    for role in (Role.PREFILL, Role.DECODE) if question.needs_decode else (Role.PREFILL,):
        of_role = (node for node in nodes if node.role is role)
        largest = max(of_role, key=lambda node: node.total_pages, default=None)
        if largest is not None and question.pages(largest) > largest.total_pages:
            return InvalidRequestError(
                f"the request needs {question.pages(largest)} pages of {largest.page_tokens} tokens; "
                f"the largest {role.value} node has {largest.total_pages}"
            )
    reasons = "; ".join(f"{name} {why}" for name, why in sorted(refused.items()))
    missing = missing_for_service(nodes) or reasons or "what is left has different page layouts"
    return UnavailableError(f"no nodes can take the request: {missing}")
