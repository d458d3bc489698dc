"""Pages of a prompt as the ranks are told of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvrelay.core.shard import Span
from kvrelay.prefill_node.rank_pages import RankPage
from kvrelay.proto.v1 import ring_pb2


def owned_runs(pages: Sequence[RankPage], prompt_pages: Span) -> list[ring_pb2.OwnedRun]:
    """Return prompt pages [start, end) as runs of neighbours on one rank; prompt page k is pages[k]."""
    firsts = [
        index
        for index in range(prompt_pages.start, prompt_pages.end)
        if index == prompt_pages.start or pages[index] != (pages[index - 1][0], pages[index - 1][1] + 1)
    ]
    return [
        ring_pb2.OwnedRun(prompt_page=first, rank=pages[first][0], first_page=pages[first][1], num_pages=end - first)
        for first, end in pairwise([*firsts, prompt_pages.end])
    ]
