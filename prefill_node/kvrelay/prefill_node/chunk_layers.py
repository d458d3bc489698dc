"""The layers of one chunk on one rank, from where it stands to its end or to where the ring leaves it.

Shapes in this file: T own tokens of the chunk, D hidden, N heads, K query/key width, Y elements of a stored row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvrelay.core.shard import Span
from kvrelay.core.types import Counters
from kvrelay.kernels.rope import RopeTables
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.prefill_step import project_and_store
from kvrelay.model.transformer import Layer, Model
from kvrelay.prefill_node.chunk_plan import ChunkPlan
from kvrelay.prefill_node.chunk_work import ChunkWork
from kvrelay.prefill_node.device_queue import DeviceQueue, to_device
from kvrelay.prefill_node.group import Header, Leave
from kvrelay.prefill_node.rank_relays import RankRelays
from kvrelay.prefill_node.rank_request import RankRequest
from kvrelay.prefill_node.ring import Kept, Ring

# From here on a layer takes a device so much longer than its launch takes the thread that it is launched just in time.
_LONG_LAYER_TOKENS = 16_384

AskLeave = Callable[[int, int], Leave]  # which layer is next, of how many; heeded on rank 0 only


class ChunkLayers:
    """Used by the step thread only."""

    def __init__(
        self,
        model: Model,
        pool: LatentPool,
        ring: Ring,
        relays: RankRelays,
        *,
        queue: DeviceQueue | None,
        counters: Counters,
    ) -> None:
        """`queue`: of the pool's device; None for a CPU."""
        self._model = model
        self._pool = pool
        self._ring = ring
        self._relays = relays
        self._queue = queue
        self._counters = counters
        # Without others to wait for, a device gets a whole layer before what leaves beside it.
        self._layer_first = relays.runs_beside and ring.size == 1

    @property
    def num_layers(self) -> int:
        return len(self._model.layers)

    def begin(self, tokens: Span, plan: ChunkPlan, ids: npt.NDArray[np.int32], *, prompt_tokens: int) -> ChunkWork:
        """Return a chunk that stands before its first layer.

        Args:
            ids: of the chunk, and the one behind it if there is one.
        """
        if not len(plan.positions_T):
            return ChunkWork(tokens, plan, ids, torch.empty(0, device=self._pool.device), None)
        own_ids = to_device(ids[plan.positions_T - tokens.start].astype(np.int64), self._pool.device)
        positions_T = to_device(plan.positions_T, self._pool.device)
        # The base of dynamic NTK comes from the whole prompt, in every chunk and on every rank.
        rope = self._model.rope(positions_T, prompt_tokens)
        return ChunkWork(tokens, plan, ids, self._model.embed(own_ids), rope)

    def run(
        self, step_id: int, request: RankRequest, work: ChunkWork, pushes: Collection[RankRequest], ask: AskLeave
    ) -> Leave:
        """Compute until the last layer, or until the ring leaves: all ranks at the same layer.

        Args:
            pushes: requests of which some may be; a portion of each leaves with each layer.

        Returns:
            NO: `work.hidden_TD` is the last layer's output. PAUSE: `work` stands before `work.next_layer`. STOP: it is
            good for nothing.
        """
        for index in range(work.next_layer, self.num_layers):
            if self._queue is not None:
                self._queue.await_layer()
            leave = ask(index, self.num_layers) if self._ring.rank == 0 else Leave.NO
            if leave is not Leave.NO and self._ring.size == 1:
                return leave
            leave = self._layer(Header(step_id, index, leave), request, work)
            if leave is Leave.STOP:
                return leave
            work.next_layer = index + 1
            self._relays.pump_pushes(pushes)
            self._counters.add("layers")
            if leave is Leave.PAUSE:
                return leave
        return Leave.NO

    def _layer(self, header: Header, request: RankRequest, work: ChunkWork) -> Leave:
        """Compute one layer, whole unless the ring stops; return what rank 0 has said in it."""
        index, plan, layer = header.layer, work.plan, self._model.layers[header.layer]
        q_TNK, stored_TY = None, self._pool.rows(0)[:0]
        if work.rope is not None:
            q_TNK, stored_TY = self._project(index, layer, work.hidden_TD, work.rope, plan.own_kept)
        final = self._relays.mark(request)
        # The last layer's rows leave first of all: whoever decodes waits for them.
        layer_first = self._layer_first and index < self.num_layers - 1
        if not layer_first:
            self._relays.send_early(request, index, plan.early, final)
        attended, leave = self._ring.attend(
            layer, q_TNK, stored_TY, plan.laps, header=header, scale=self._model.softmax_scale
        )
        if leave is Leave.STOP:
            return leave
        if self._queue is not None and len(plan.positions_T) >= _LONG_LAYER_TOKENS:
            self._queue.attended()
        self._relays.send_late(request, index, plan.late)
        if work.rope is not None:
            work.hidden_TD = layer.finish(work.hidden_TD, attended.out_TNV.to(work.hidden_TD.dtype))
        if layer_first:
            self._relays.send_early(request, index, plan.early, final)
        return leave

    def _project(
        self, index: int, layer: Layer, hidden_TD: Tensor, rope: RopeTables, kept: Kept | None
    ) -> tuple[Tensor, Tensor]:
        """Return own queries q_TNK and rows_TY as pages hold them, after storing those that stay here."""
        if kept is not None and kept.rows is None:
            return project_and_store(layer, hidden_TD, rope, self._pool, index, kept.slots)
        projected = layer.project(hidden_TD, rope)
        stored_TY = self._pool.stored(projected.rows_TW)
        if kept is not None:
            self._pool.write_stored(index, kept.slots, kept.of(stored_TY))
        return projected.q_TNK, stored_TY
