"""Decode steps on a GPU: recorded once per batch size as CUDA graphs, then replayed.

A step's inputs go into buffers whose addresses never change: one small copy for what changes with every token, and page
tables only when a row gets another sequence. The host waits once per step, for the chosen ids.

Shapes in this file: B rows of the batch, P pages of the longest sequence, V vocabulary, F settings of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvrelay.core.errors import CapacityError, ServeError
from kvrelay.core.types import SampledToken
from kvrelay.kernels.mla_decode import DecodePlan
from kvrelay.kernels.paged_plan import PagedPlan
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.decode_step import decode_hidden
from kvrelay.model.device_sampler import NUM_SETTINGS, CountRows, choose, settings_row
from kvrelay.model.sampler import NonFiniteLogitsError, SamplerState, sample
from kvrelay.model.transformer import Model

WARM_UP_STEPS = 2  # before a step is recorded: kernels compile, libraries allocate their workspaces


@dataclass(frozen=True, slots=True)
class StepRow:
    """One sequence of one step."""

    page_table: Tensor  # int64 or int32, on the CPU or the device; the same object in every step of a sequence
    token: int  # the last one; its row is written in this step
    position: int  # of that token
    sampler: SamplerState


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """Return the batch sizes that are recorded: 1, 2, 4, 8, then every eighth, up to one that holds `max_batch`."""
    eighths = range(16, -(-max_batch // 8) * 8 + 1, 8)
    return (*(size for size in (1, 2, 4, 8) if size < 2 * max_batch), *eighths)


class _Step:
    """One batch size: a graph to replay, or the same computation done anew each time."""

    def __init__(
        self,
        body: Callable[[], tuple[Tensor, Tensor, Tensor]],
        graph: torch.cuda.CUDAGraph | None,
        outputs: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        """
        Args:
            body: returns logits_BV fp32, their maxima and where those are; the latter two come to the host as well.
            outputs: of the graph, overwritten by each replay; None without a graph.
        """
        self._body = body
        self._graph = graph
        self._outputs = outputs

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._graph is None or self._outputs is None:
            return self._body()
        self._graph.replay()
        return self._outputs


class DecodeGraphs:
    """The recorded steps of one model over one pool. Owned by one thread."""

    def __init__(self, model: Model, pool: LatentPool, *, max_batch: int, max_tokens: int, record: bool = True) -> None:
        """
        Args:
            max_tokens: longest prompt plus output.
            record: False computes every step anew, from the same buffers.
        """
        self._model, self._pool, self._records = model, pool, record
        self._sizes = batch_sizes(max_batch)
        rows, device = self._sizes[-1], pool.device
        layout = pool.layout
        pinned = device.type == "cuda"
        self._max_pages = layout.pages_for(max_tokens)
        whole = PagedPlan.allocate(
            num_sequences=rows, max_pages=self._max_pages, page_tokens=layout.page_tokens, device=device
        )
        self._plan = whole
        self._inputs_host = torch.zeros(2, rows, dtype=torch.int64, pin_memory=pinned)
        self._inputs_2B = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._settings_host = torch.zeros(rows, NUM_SETTINGS, dtype=torch.float64, pin_memory=pinned)
        self._best_host = torch.zeros(rows, dtype=torch.float32, pin_memory=pinned)
        self._greedy_host = torch.zeros(rows, dtype=torch.int64, pin_memory=pinned)
        self._drawn_host = torch.zeros(rows, dtype=torch.int64, pin_memory=pinned)
        self._tables: list[Tensor | None] = [None] * rows
        self._counts: CountRows | None = None
        self._memory: Any = None  # the graphs' common memory pool
        self._steps: dict[int, _Step] = {}
        self._next_settings: dict[tuple[SamplerState, int], list[float]] = {}  # not by id: a new one may get it

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record every batch size, largest first, so that the smaller ones fit into its memory. Before serving.

        Each is replayed once with no rows: the first replay of a graph also brings it to the device.
        """
        for size in reversed(self._sizes):
            self._step_of(size)
        self._load([])
        for step in self._steps.values():
            step.run()

    @torch.inference_mode()
    def run(
        self, rows: Sequence[StepRow], *, meanwhile: Callable[[], None] | None = None
    ) -> list[SampledToken | ServeError]:
        """Write each row's last token into the pool and choose the token after it.

        Args:
            meanwhile: called once, while the device computes.

        Raises:
            CapacityError: more rows than `max_batch`, or a table longer than `max_tokens`.
        """
        step = self._step_of(self._size_for(len(rows)))
        self._load(rows)
        logits_BV, _, _ = step.run()
        chosen_host = self._greedy_host
        if not all(row.sampler.is_plain_greedy for row in rows):
            chosen_host = self._drawn_host
            chosen_host[: len(rows)].copy_(self._sample(logits_BV, rows), non_blocking=True)
        done = None
        if self._pool.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            self._prepare_next(rows)  # while the device computes
        if meanwhile is not None:
            meanwhile()
        if done is not None:
            done.synchronize()
        return list(self._answers(logits_BV, rows, chosen_host.tolist(), self._best_host.tolist()))

    def _size_for(self, count: int) -> int:
        for size in self._sizes:
            if count <= size:
                return size
        raise CapacityError(f"{count} rows in one step, {self._sizes[-1]} possible")

    def _load(self, rows: Sequence[StepRow]) -> None:
        """Put the rows into the buffers; rows behind them are empty."""
        tokens, lengths = self._inputs_host.numpy()
        for index, row in enumerate(rows):
            tokens[index], lengths[index] = row.token, row.position + 1
            if self._tables[index] is not row.page_table:
                self._load_table(index, row.page_table)
        lengths[len(rows) :] = 0
        tokens[len(rows) :] = 0

    def _load_table(self, index: int, table: Tensor) -> None:
        if len(table) > self._max_pages:
            raise CapacityError(f"a sequence of {len(table)} pages, room for {self._max_pages}")
        self._plan.page_table_BP[index, : len(table)].copy_(table)
        self._tables[index] = table

    def _step_of(self, size: int) -> _Step:
        if size not in self._steps:
            self._steps[size] = self._make(size)
        return self._steps[size]

    @torch.inference_mode()
    def _make(self, size: int) -> _Step:
        paged = self._plan_of(size)
        plan = DecodePlan.of(paged)

        def body() -> tuple[Tensor, Tensor, Tensor]:
            self._inputs_2B.copy_(self._inputs_host, non_blocking=True)
            paged.lengths_B.copy_(self._inputs_2B[1, :size])
            paged.refresh_()
            lengths_B = self._inputs_2B[1, :size].clamp(min=1)  # an empty row computes position 0 and stores nothing
            hidden_BD = decode_hidden(
                self._model, self._pool, self._inputs_2B[0, :size], lengths_B - 1, plan, lengths_B
            )
            outputs = self._model.best(hidden_BD)
            self._best_host[:size].copy_(outputs[1], non_blocking=True)
            self._greedy_host[:size].copy_(outputs[2], non_blocking=True)
            return outputs

        if not self._records or self._pool.device.type != "cuda":
            return _Step(body, None, None)
        self._inputs_host.zero_()  # nothing is stored while a step is recorded
        side = torch.cuda.Stream(self._pool.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                body()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            outputs = body()
        self._memory = self._memory or graph.pool()
        return _Step(body, graph, outputs)

    def _plan_of(self, size: int) -> PagedPlan:
        """Return a plan of the first `size` rows; all sizes share one page table."""
        whole = self._plan
        one = PagedPlan.allocate(
            num_sequences=size, max_pages=1, page_tokens=whole.page_tokens, device=whole.page_table_BP.device
        )
        return PagedPlan(
            page_table_BP=whole.page_table_BP[:size],
            lengths_B=one.lengths_B,
            slots_B=one.slots_B,
            starts_B1=one.starts_B1,
            page_tokens=one.page_tokens,
            tile_tokens=one.tile_tokens,
        )

    def _sample(self, logits_BV: Tensor, rows: Sequence[StepRow]) -> Tensor:
        """Return the ids that the rows' settings choose, on the device."""
        states = [row.sampler for row in rows]
        counts = None
        if any(state.has_penalties for state in states):
            if self._counts is None:
                self._counts = CountRows(
                    rows=len(self._tables), vocabulary=logits_BV.shape[1], device=self._pool.device
                )
            counts = self._counts.update(states, [row.token for row in rows])
        settings = self._settings_host[: len(rows)]
        for index, row in enumerate(rows):
            position = row.position + 1
            known = self._next_settings.pop((row.sampler, position), None)
            settings[index] = torch.tensor(known or settings_row(row.sampler, position), dtype=torch.float64)
        return choose(logits_BV[: len(rows)], settings.to(self._pool.device, non_blocking=True), counts)

    def _prepare_next(self, rows: Sequence[StepRow]) -> None:
        """Draw the next step's uniform numbers, which are known already."""
        self._next_settings = {
            (row.sampler, row.position + 2): settings_row(row.sampler, row.position + 2)
            for row in rows
            if row.sampler.sampling.temperature
        }

    def _answers(
        self, logits_BV: Tensor, rows: Sequence[StepRow], ids: Sequence[int], best: Sequence[float]
    ) -> Iterator[SampledToken | ServeError]:
        for index, row in enumerate(rows):
            position = row.position + 1
            if not math.isfinite(best[index]):
                yield NonFiniteLogitsError(position, best[index])
            elif row.sampler.sampling.logprobs is not None:
                yield sample(logits_BV[index : index + 1], [row.sampler], [position])[0]
            else:
                yield SampledToken(ids[index])
