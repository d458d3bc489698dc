"""What each prefill node of a large fleet had best fetch, for all at once, with the formulas of `fetch.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvrelay.core.types import LOAD_START_S, Incarnation, Role
from kvrelay.router.fetch import MOST_SOURCES, start_s, usual_token_s
from kvrelay.router.node_columns import ranks_by_name
from kvrelay.router.score import Question

if TYPE_CHECKING:
    from kvrelay.router.fleet import NodeView

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class SourceColumns:
    """All nodes of a roster, as those that others may fetch from."""

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        self._row = {node.incarnation: row for row, node in enumerate(nodes)}
        self._pulls = any(node.pulls and node.role is Role.PREFILL for node in nodes)
        self._queued_tokens = np.array([node.queued_tokens for node in nodes], np.int64)
        self._by_name = ranks_by_name([node.incarnation for node in nodes])
        self._layouts = {node.layout_fingerprint: number for number, node in enumerate(nodes)}
        self._layout = np.array([self._layouts[node.layout_fingerprint] for node in nodes])

    def update(self, row: int, node: NodeView) -> None:
        self._queued_tokens[row] = node.queued_tokens

    def rows(self, question: Question, held: Ints) -> dict[bytes, list[int]]:
        """Return the rows of what `fetch.sources_of` finds, given what each node has of the prompt; nothing when
        nobody fetches."""
        if not self._pulls:
            return {}
        rows = np.flatnonzero(held)
        if not_asked := [self._row[node] for node in question.avoid | question.no_pull if node in self._row]:
            rows = rows[~np.isin(rows, not_asked)]
        order = rows[np.lexsort((self._by_name[rows], self._queued_tokens[rows], -held[rows]))]
        return {
            layout: order[self._layout[order] == number][:MOST_SOURCES].tolist()
            for layout, number in self._layouts.items()
        }


@dataclass(frozen=True, slots=True)
class Fetched:
    """What each node had best fetch; 0 for nodes that had best compute."""

    transfer_s: Floats
    saved_s: Floats  # of computation


class FetchColumns:
    """Of the prefill nodes of one page layout."""

    def __init__(self, nodes: Sequence[NodeView], block_tokens: Ints) -> None:
        self._names = [node.incarnation.name for node in nodes]
        self._place = {node.incarnation: place for place, node in enumerate(nodes)}
        self._pulls = np.array([node.pulls for node in nodes], bool)
        self._host_token_s = np.array([node.host_token_s for node in nodes], float)
        self._block_tokens = block_tokens
        self._links: dict[Incarnation, tuple[Mapping[str, float], Floats]] = {}

    def best(
        self,
        question: Question,
        usable: Ints,
        compute_s: Floats,
        sources: Sequence[NodeView],
        compute_behind: Callable[[Ints], Floats],
    ) -> Fetched | None:
        """Return what each node had best fetch; None when there is nothing to fetch at all.

        Args:
            usable: tokens that each node has; `compute_s`: in which it computes the others.
            sources: see `fetch.sources_of`.
            compute_behind: returns the time in which each node computes what is behind so many tokens.
        """
        if not sources and not question.host_tokens:
            return None
        last_block = (question.prompt_tokens - 1) // self._block_tokens * self._block_tokens
        transfer_s, saved_s = self._from_host(question, usable, compute_s, last_block, compute_behind)
        behind: dict[int, Floats] = {}  # by what a source has: of many, most have the same
        for source in sources if self._pulls.any() else ():
            held = question.held(source)
            upto = np.minimum(held, last_block)
            if held not in behind:
                behind[held] = compute_s - compute_behind(upto)
            tokens = upto - usable
            carried = tokens + _shared_tokens(tokens, question.load(source).fetches)
            takes = start_s(source, question) + carried * self._token_s(source, question)
            pays = self._pulls & (upto > usable) & (takes < behind[held])
            if (itself := self._place.get(source.incarnation)) is not None:
                pays[itself] = False
            better = pays & (behind[held] - takes > saved_s - transfer_s)
            transfer_s[better], saved_s[better] = takes[better], behind[held][better]
        return Fetched(transfer_s, saved_s)

    def _from_host(
        self,
        question: Question,
        usable: Ints,
        compute_s: Floats,
        last_block: Ints,
        compute_behind: Callable[[Ints], Floats],
    ) -> tuple[Floats, Floats]:
        """Return the same of what each node loads from its own host memory; see `fetch.host_load`."""
        held = np.zeros(len(usable), np.int64)
        for node, tokens in question.host_tokens.items():
            if (place := self._place.get(node)) is not None:
                held[place] = tokens
        if not held.any():
            return np.zeros(len(usable)), np.zeros(len(usable))
        upto = np.minimum(held, last_block)
        takes = LOAD_START_S + (upto - usable) * self._host_token_s
        saved = compute_s - compute_behind(upto)
        pays = (upto > usable) & (takes < saved)
        return np.where(pays, takes, 0.0), np.where(pays, saved, 0.0)

    def _token_s(self, source: NodeView, question: Question) -> Floats | float:
        usual = usual_token_s(source, question)
        if not source.links:
            return usual
        known = self._links.get(source.incarnation)
        if known is None or known[0] is not source.links:
            found = np.array([source.links.get(name) or np.nan for name in self._names])
            known = self._links[source.incarnation] = source.links, found
        return np.where(np.isnan(known[1]), usual, known[1])


def _shared_tokens(tokens: Ints, others: Sequence[int]) -> Ints | int:
    """Return what `fetch.shared_tokens` does for each of many fetches; of less than 0 tokens it says nothing."""
    if not others:
        return 0
    shortest_first = np.sort(others)
    whole = np.searchsorted(shortest_first, tokens)  # so many others are over before
    shared: Ints = np.append(0, shortest_first.cumsum())[whole] + (len(others) - whole) * tokens
    return shared
