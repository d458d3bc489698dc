"""The two ways to share one prompt's attention that the ring of latents is measured against, on the same kernels.

Shapes in this file: T own tokens, S all tokens, N heads, H = N / R heads of a rank, K key width, V value width,
W latent row, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrelay.core.shard import Span
from kvrelay.model.transformer import Layer
from kvrelay.prefill_node import ring_plan
from kvrelay.prefill_node.group import RingGroup
from kvrelay.prefill_node.ring import Lap, Partial
from kvrelay.prefill_node.ring_plan import Pair


def expanded_ring(layer: Layer, group: RingGroup, q_TNK: Tensor, own_TW: Tensor, lap: Lap, *, scale: float) -> Tensor:
    """Return out_TNV when expanded keys and values rotate: no re-expansion, many times the bytes."""
    k_TNK, v_TNV = layer.expand(own_TW)
    merged = Partial(q_TNK)
    heads, key_width, value_width = q_TNK.shape[1], k_TNK.shape[2], v_TNV.shape[2]
    passing = torch.cat((k_TNK.flatten(1), v_TNV.flatten(1)), 1)
    for hop in range(group.size):
        source = (group.rank - hop) % group.size
        exchange, incoming = None, passing
        if hop < group.size - 1:
            incoming = passing.new_empty(lap.num_rows[(source - 1) % group.size], passing.shape[1])
            exchange = group.post(passing, incoming, None)
        k = passing[:, : heads * key_width].view(-1, heads, key_width)
        v = passing[:, heads * key_width :].view(-1, heads, value_width)
        for pair in lap.pairs[source]:
            merged.add(pair, k, v, scale)
        if exchange is not None:
            exchange.wait()
        passing = incoming
    return merged.out_TNV


def split_heads(
    layer: Layer, group: RingGroup, q_TNK: Tensor, own_TW: Tensor, spans: Sequence[Sequence[Span]], *, scale: float
) -> Tensor:
    """Return out_TNV when every rank attends some heads over all tokens: no merge, two exchanges of all to all.

    Every rank has as many tokens; the latents of all of them are gathered and expanded for the rank's heads.
    """
    size, heads = group.size, q_TNK.shape[1]
    own_heads = slice(group.rank * heads // size, (group.rank + 1) * heads // size)
    order = torch.from_numpy(ring_plan.positions_of([span for rank in spans for span in rank])).to(q_TNK.device)
    rows_SW = _in_place(group.all_gather(own_TW), order)
    q_RTHK = q_TNK.view(len(q_TNK), size, heads // size, -1).transpose(0, 1).contiguous()
    q_SHK = _in_place(group.all_to_all(q_RTHK).flatten(0, 1), order)
    k_SNK, v_SNV = layer.expand(rows_SW)
    whole = Span(0, len(order))
    merged = Partial(q_SHK)
    merged.add(Pair(whole, whole, causal=True), k_SNK[:, own_heads], v_SNV[:, own_heads], scale)
    out_RTHV = merged.out_TNV.to(q_TNK.dtype).index_select(0, order).view(size, len(q_TNK), heads // size, -1)
    out_RTHV = group.all_to_all(out_RTHV.contiguous())
    return out_RTHV.transpose(0, 1).flatten(1, 2)


def _in_place(rows: Tensor, order: Tensor) -> Tensor:
    """Return rows that came in rank order at their positions."""
    return torch.empty_like(rows).index_copy_(0, order, rows)
