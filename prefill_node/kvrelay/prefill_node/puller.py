"""Fetches blocks of a prompt from a node that has them, ahead of the prompt's computation.

Rank 0 takes the pages, every rank has its own of them written (`RankFetcher`), and what fails is computed instead.
"""

from __future__ import annotations

import asyncio
import logging

from kvrelay.core.clock import Deadline
from kvrelay.core.types import Counters
from kvrelay.prefill_node.fills import FillOrder, PullFrom
from kvrelay.prefill_node.jobs import FillEnded, Job
from kvrelay.prefill_node.leader import Leader
from kvrelay.prefill_node.step_answer import Reply

log = logging.getLogger(__name__)


class Puller:
    """All fetches of a node. Owned by the event loop."""

    def __init__(self, leader: Leader, *, block_tokens: int, row_bytes: int, timeout_s: float) -> None:
        """
        Args:
            row_bytes: of one token in all layers.
            timeout_s: longest time that a fetch may take.
        """
        self.counters = Counters()
        self._leader = leader
        self._block_tokens = block_tokens
        self._row_bytes = row_bytes
        self._timeout_s = timeout_s

    async def pull(self, job: Job, source: PullFrom, deadline: Deadline) -> int:
        """Fetch whole blocks before a job's last token that this node lacks and `source` has.

        Returns:
            The tokens that came; 0 when nothing was missing, there was no room, or it failed.
        """
        most = min(source.tokens, job.prompt_tokens - 1) // self._block_tokens
        hashes, key = job.usable_hashes[:most], f"pull {job.key}"
        timeout_s = min(self._timeout_s, deadline.remaining_s())
        if not hashes or timeout_s <= 0.0:
            return 0
        reply = Reply[FillEnded]()
        self._leader.fill(FillOrder(key, job.request, source, hashes, timeout_s), reply.give)
        try:
            ended = await reply.future
        except asyncio.CancelledError:
            self._leader.give_up_fill(key, "the request is given up")
            raise
        if not ended.num_tokens and ended.reason is None:
            return 0  # nothing was to be fetched
        self.counters.add("pulls_total")
        if ended.reason is not None:
            self.counters.add("pulls_failed_total")
            log.warning("%s from %s failed, its tokens are computed: %s", key, source.node, ended.reason)
            return 0
        self.counters.add("pulled_tokens_total", ended.num_tokens)
        self.counters.add("pulled_bytes_total", ended.num_tokens * self._row_bytes)
        return ended.num_tokens
