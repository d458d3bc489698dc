"""Whether a job's blocks are brought in from host memory before it begins. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.core.shard import Span
from kvrelay.prefill_node.job_record import JobRecord
from kvrelay.prefill_node.pages import LoadStart, RingPages


def load_from_host(
    pages: RingPages, record: JobRecord, *, block_tokens: int, pays: Callable[[Span], bool]
) -> tuple[LoadStart | None, list[bytes]]:
    """Have blocks brought in that host memory has, once, when that is faster than computing them.

    Args:
        pays: whether loading these tokens is faster.

    Returns:
        (what came of it, None when nothing is to be loaded; hashes of evicted blocks).
    """
    if record.is_weighed:
        return None, []
    job = record.job
    blocks = pages.in_host(job.usable_hashes, job.prompt_tokens)
    if blocks is None:
        return None, []
    if not pays(Span(blocks.start * block_tokens, blocks.end * block_tokens)):
        start, evicted = None, list[bytes]()
    else:
        start, evicted = pages.load(job.usable_hashes, blocks, job.prompt_tokens)
    if start in (None, LoadStart.BEGUN):
        record.is_weighed = True
        pages.count_host_hit()
    return start, evicted
