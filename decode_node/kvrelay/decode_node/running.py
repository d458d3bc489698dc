"""Requests that the step thread works on: what it reports of them, until it has let go of their pages.

Owned by the asyncio thread; never waits.
"""

from __future__ import annotations

import asyncio

from kvrelay.core.errors import ServeError
from kvrelay.core.types import Counters, Epoch, FinishReason, Incarnation
from kvrelay.decode_node.admission import PageBook
from kvrelay.decode_node.engine import SequenceState
from kvrelay.decode_node.local_prefill import Prompt
from kvrelay.decode_node.publisher import Publisher
from kvrelay.decode_node.records import Records
from kvrelay.decode_node.requests import Admitted, Done, First, Phase, Record
from kvrelay.decode_node.runner import Chosen, Joined, Left, Prefilled, Stepped, StepThread, count_step
from kvrelay.kv_transfer.reader_hub import ReaderHub

_CACHE_AFTER_S = 0.02


class RunningRequests:
    """Of one node, from when the step thread is given a request's pages."""

    def __init__(
        self,
        incarnation: Incarnation,
        records: Records,
        counters: Counters,
        book: PageBook,
        publisher: Publisher,
        *,
        block_tokens: int,
    ) -> None:
        self._incarnation = incarnation
        self._records = records
        self._counters = counters
        self._book = book
        self._publisher = publisher
        self._block_tokens = block_tokens
        self._hub: ReaderHub
        self._steps: StepThread

    def wire(self, *, hub: ReaderHub, steps: StepThread) -> None:
        """Make known whom it tells; once, before the first request."""
        self._hub, self._steps = hub, steps

    def prepare(self, record: Record) -> None:
        """Make ready what a request's first step needs, while its latents come in."""
        record.state = SequenceState.of(record.pages, record.sampler())
        self._steps.prepare(record.state)

    def join(self, record: Record) -> None:
        state = record.state or SequenceState.of(record.pages, record.sampler())
        state.sampler.observe(record.output[0])
        self._steps.join(record.sequence(first_token=record.output[0]), state)

    def compute(self, record: Record) -> None:
        """Let the step thread complete a prompt; from here on it uses the pages."""
        self._hub.claim(record.epoch)
        record.computes = record.prompt_tokens - record.resident_tokens
        record.phase = Phase.RUNNING
        record.events.put_nowait(Admitted(None, record.resident_tokens, 0.0))
        self._counters.add("resident_tokens", record.resident_tokens)
        prompt = Prompt(record.sequence(first_token=None), record.ask.prompt_T, record.resident_tokens)
        self._steps.compute(prompt, SequenceState.of(record.pages, record.sampler()))

    def on_report(self, report: Joined | Left | Stepped | Prefilled) -> None:
        match report:
            case Stepped():
                count_step(self._counters, report)
                for chosen in report.chosen:
                    self._on_chosen(self._records.get(chosen.key), chosen, report.step_s)
            case Prefilled(first, at_s):
                self._on_prefilled(self._records.get(first.key), first, at_s)
            case Joined(key, at_s):
                if (record := self._records.get(key)) is not None:
                    record.events.put_nowait(record.admitted(at_s))
            case Left(key):
                if (record := self._records.get(key)) is not None:
                    record.phase = Phase.OVER
                self._hub.released(Epoch(self._incarnation, key))

    def _on_prefilled(self, record: Record | None, first: Chosen, at_s: float) -> None:
        if record is None or record.phase is not Phase.RUNNING:
            return  # given up while the chunk ran: `Left` follows
        if isinstance(first.token, ServeError):
            self._over(record, first.token)
            return
        record.output.append(first.token.token_id)
        record.events.put_nowait(First(first.token, at_s - record.began_s, record.computes))
        self._counters.add("local_prefills")
        self._counters.add("local_prefill_tokens", record.computes)
        self.cache_soon(record)
        if first.finish is not None:
            self.finish(record, first.finish)

    def _on_chosen(self, record: Record | None, chosen: Chosen, step_s: float) -> None:
        if record is None or record.phase is not Phase.RUNNING:
            return  # given up while the step ran: `Left` follows
        if isinstance(chosen.token, ServeError):
            self._over(record, chosen.token)
            return
        record.first_step_s = record.first_step_s or step_s
        record.num_steps += 1
        record.steps_s += step_s
        record.output.append(chosen.token.token_id)
        record.events.put_nowait(chosen.token)
        if chosen.finish is not None:
            self.finish(record, chosen.finish)

    def finish(self, record: Record, reason: FinishReason) -> None:
        if record.phase is Phase.RUNNING:
            self._over(record, record.done(reason))

    def give_up(self, record: Record) -> None:
        """Stop a request; `Left` is reported when the step thread has let go of its pages."""
        if record.output:  # its prompt is complete
            self._cache(record)
        record.phase = Phase.LEAVING
        self._steps.leave(record.key)

    def cache_soon(self, record: Record) -> None:
        """Cache and publish what is written of a prompt once its next token is out: a long one has thousands of blocks.

        A request that ends before does so itself, however it ends.
        """
        asyncio.get_running_loop().call_later(_CACHE_AFTER_S, self._cache_running, record)

    def _over(self, record: Record, last: Done | ServeError) -> None:
        """End a request whose pages the step thread has let go of."""
        record.phase = Phase.OVER
        record.events.put_nowait(last)
        if isinstance(last, ServeError):
            self._counters.add("requests_failed")
            self._hub.released(record.epoch)
        else:
            self._counters.add("requests_finished")
            asyncio.get_running_loop().call_soon(self._let_go, record)  # behind the words that go out

    def _let_go(self, record: Record) -> None:
        self._cache(record)
        self._hub.released(record.epoch)

    def _cache_running(self, record: Record) -> None:
        if record.phase is Phase.RUNNING:
            self._cache(record)

    def _cache(self, record: Record) -> None:
        """Cache and publish all blocks that are written."""
        hashes = record.written_hashes(self._block_tokens)
        self._publisher.publish(self._book.cache_blocks(hashes, record.pages))
