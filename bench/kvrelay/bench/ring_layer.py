"""One layer's inputs on one rank of a ring, and the ways to attend them that `bench ring` compares.

Shapes in this file: T own tokens, S all tokens, N heads, K key width, V value width, W latent row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvrelay.bench import ring_rivals
from kvrelay.core.shard import Span
from kvrelay.core.types import Counters
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.transformer import Model
from kvrelay.prefill_node import ring_plan
from kvrelay.prefill_node.group import Header, Leave, RingGroup
from kvrelay.prefill_node.ring import Lap, Ring

Way = Callable[[], Tensor]
HEADER = Header(0, 0, Leave.NO)


class RingLayer:
    """Random queries and rows of one prompt: this rank's part of them, and on rank 0 all."""

    def __init__(self, model: Model, group: RingGroup, tokens: int) -> None:
        self._layer, self._scale = model.layers[0], model.softmax_scale
        self._group, self._tokens = group, tokens
        self._pool = LatentPool(model.layout(block_tokens=64), 1, model.device)
        config = model.config
        generator = torch.Generator(model.device).manual_seed(7)  # equal on all ranks

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=model.dtype, device=model.device, generator=generator)

        rows_SW = randn(tokens, config.kv_lora_rank + config.rope_width)
        queries_SNK = randn(tokens, config.num_heads, config.key_width)
        self._spans = ring_plan.rank_spans(Span(0, tokens), ring_size=group.size, align_tokens=64)
        own = torch.from_numpy(ring_plan.positions_of(self._spans[group.rank])).to(model.device)
        self._q_TNK, self._own_TW = queries_SNK[own], rows_SW[own]
        self._whole = (queries_SNK, rows_SW) if group.rank == 0 else None
        self._lap = Lap(
            [sum(span.num_tokens for span in one) for one in self._spans],
            [ring_plan.visible_pairs(self._spans[group.rank], one) for one in self._spans],
            [None] * group.size,
        )

    def way(self, name: str, group: RingGroup | None = None) -> Way:
        """Return what attends the layer once and returns out_TNV.

        Args:
            name: latent, expanded or heads.
            group: exchanges; None = the one that connects the ranks.
        """
        over, layer, lap, scale = group or self._group, self._layer, self._lap, self._scale
        q_TNK, own_TW, spans = self._q_TNK, self._own_TW, self._spans
        if name == "latent":
            ring = Ring(over, self._pool, Counters())
            return lambda: ring.attend(layer, q_TNK, own_TW, [lap], header=HEADER, scale=scale)[0].out_TNV
        if name == "expanded":
            return lambda: ring_rivals.expanded_ring(layer, over, q_TNK, own_TW, lap, scale=scale)
        return lambda: ring_rivals.split_heads(layer, over, q_TNK, own_TW, spans, scale=scale)

    def alone(self) -> Way:
        """Return what attends all of the prompt on this device. Rank 0 only."""
        assert self._whole is not None, "only rank 0 holds the whole prompt"
        queries_SNK, rows_SW = self._whole
        ring, all_of_it = Ring(None, self._pool, Counters()), Span(0, self._tokens)
        lap = Lap([self._tokens], [ring_plan.visible_pairs([all_of_it], [all_of_it])], [None])
        layer, scale = self._layer, self._scale
        return lambda: ring.attend(layer, queries_SNK, rows_SW, [lap], header=HEADER, scale=scale)[0].out_TNV

    def exchange_only(self, name: str) -> Callable[[], None]:
        """Return a layer's exchanges with nothing to hide behind: of latents, or of expanded keys and values."""
        travels = self._own_TW
        if name == "expanded":
            travels = torch.cat([part.flatten(1) for part in self._layer.expand(self._own_TW)], 1)
        group, num_rows = self._group, self._lap.num_rows
        incoming = [travels.new_empty(max(num_rows), travels.shape[1]) for _ in range(2)]

        def exchange() -> None:
            passing = travels
            for hop in range(group.size - 1):
                target = incoming[hop % 2][: num_rows[(group.rank - hop - 1) % group.size]]
                group.post(passing, target, HEADER).wait()
                passing = target

        return exchange
