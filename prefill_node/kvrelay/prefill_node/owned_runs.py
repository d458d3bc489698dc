"""Pages of a prompt as the ranks are told of them."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.shard import Span
from kvrelay.prefill_node.rank_pages import RankPage
from kvrelay.proto.v1 import ring_pb2


def owned_runs(pages: Sequence[RankPage], prompt_pages: Span) -> list[ring_pb2.OwnedRun]:
    """Return prompt pages [start, end) as runs of neighbours on one rank; prompt page k is pages[k]."""
    runs: list[ring_pb2.OwnedRun] = []
    for index in range(prompt_pages.start, prompt_pages.end):
        rank, page = pages[index]
        last = runs[-1] if runs else None
        if last is not None and last.rank == rank and last.first_page + last.num_pages == page:
            last.num_pages += 1
        else:
            runs.append(ring_pb2.OwnedRun(prompt_page=index, rank=rank, first_page=page, num_pages=1))
    return runs
