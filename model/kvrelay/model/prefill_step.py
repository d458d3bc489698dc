"""One prefill chunk on one device: rows of the chunk go into the pool, earlier rows are read from it.

Shapes in this file: T tokens of the chunk, S tokens before it, D hidden, N heads, K query/key width, V value width,
W = C + R, Y elements of a stored row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrelay.kernels.gpu_prefill import LONG_KEYS
from kvrelay.kernels.merge import merge_in_place
from kvrelay.kernels.mla_prefill import attend_block
from kvrelay.kernels.rope import RopeTables
from kvrelay.kernels.triton_support import triton_refuses
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.transformer import Layer, Model

# Earlier rows are expanded this many at a time, so memory does not grow with the prompt.
PREFIX_BLOCK_TOKENS = {"cpu": 4096, "cuda": 131_072}
# Enough that every kernel of a long prompt is chosen.
_WARM_UP_TOKENS = 4096


@torch.inference_mode()
def prefill_forward(
    model: Model, pool: LatentPool, ids_T: Tensor, *, slots: Tensor, start: int, ntk_tokens: int
) -> Tensor:
    """Compute one chunk.

    Args:
        ids_T: int64, tokens [start, start + T) of a prompt, on the model's device.
        slots: int64, pool slots of positions 0 .. start + T; rows before `start` are already written.
        ntk_tokens: length of the whole prompt, whatever the chunk; only dynamic NTK reads it.

    Returns:
        hidden_TD after the last layer; `Model.logits` takes it.
    """
    end = start + ids_T.shape[0]
    rope = model.rope(torch.arange(start, end, device=ids_T.device), ntk_tokens)
    hidden_TD = model.embed(ids_T)
    block_tokens = PREFIX_BLOCK_TOKENS[model.device.type]
    for number, layer in enumerate(model.layers):
        q_TNK, stored_TY = project_and_store(layer, hidden_TD, rope, pool, number, slots[start:end])
        expanded = layer.expand(pool.computed(stored_TY))
        out_TNV, lse_TN = attend_block(q_TNK, *expanded, scale=model.softmax_scale, causal=True)
        del expanded  # the largest temporaries
        if start > block_tokens:  # more than two partial results are joined in fp32
            out_TNV = out_TNV.float()
        for first in range(0, start, block_tokens):
            rows_SW = pool.read(number, slots[first : min(first + block_tokens, start)])
            merge_in_place(out_TNV, lse_TN, *layer.attend(q_TNK, rows_SW, scale=model.softmax_scale))
        hidden_TD = layer.finish(hidden_TD, out_TNV)
    return hidden_TD


def project_and_store(
    layer: Layer, hidden_TD: Tensor, rope: RopeTables, pool: LatentPool, number: int, slots_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Return queries q_TNK of the layer with this number, and rows_TY as they were stored in `slots_T`."""
    if hidden_TD.is_cuda and triton_refuses("cuda") is None:
        q_TNK = layer.project_and_store(hidden_TD, rope, slots_T, pool.rows(number))
        return q_TNK, pool.read_stored(number, slots_T)
    projected = layer.project(hidden_TD, rope)
    stored_TY = pool.stored(projected.rows_TW)
    pool.write_stored(number, slots_T, stored_TY)
    return projected.q_TNK, stored_TY


@torch.inference_mode()
def warm_up(model: Model) -> None:
    """Compute one layer of each kind over some tokens, with and without rows before them, and keep nothing.

    On a GPU some kernels are compiled at their first use, which takes seconds: no request waits for that afterwards,
    nor a ring for one of its ranks.
    """
    tokens, scale = _WARM_UP_TOKENS, model.softmax_scale
    positions_T = torch.arange(tokens, device=model.device)
    rope = model.rope(positions_T, tokens)
    for layer in {model.config.is_moe_layer(number): layer for number, layer in enumerate(model.layers)}.values():
        hidden_TD = model.embed(positions_T % model.config.vocab_size)
        projected = layer.project(hidden_TD, rope)
        k_TNK, v_TNV = layer.expand(projected.rows_TW)
        out_TNV, lse_TN = attend_block(projected.q_TNK, k_TNK, v_TNV, scale=scale, causal=True)
        merge_in_place(out_TNV, lse_TN, *layer.attend(projected.q_TNK, projected.rows_TW, scale=scale))
        layer.finish(hidden_TD, out_TNV)
    if model.device.type != "cpu":  # long calls have a kernel with tiles of their own
        times = -(-LONG_KEYS // tokens)
        k_SNK, v_SNV = layer.expand(projected.rows_TW.repeat(times, 1))
        attend_block(projected.q_TNK.repeat(times, 1, 1), k_SNK, v_SNV, scale=scale, causal=True)
