"""One decode step: one new token for every sequence of the batch, in one forward pass.

Shapes in this file: B sequences, D hidden, N heads, C latent, W = C + R, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrelay.kernels.mla_decode import DecodePlan, mla_decode
from kvrelay.kernels.rope import RopeTables
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.transformer import Layer, Model


@torch.inference_mode()
def decode_forward(
    model: Model,
    pool: LatentPool,
    ids_B: Tensor,
    positions_B: Tensor,
    plan: DecodePlan,
    ntk_tokens: Tensor | int,
) -> Tensor:
    """Return the logits of `decode_hidden`'s tokens, fp32, on the model's device."""
    return model.logits(decode_hidden(model, pool, ids_B, positions_B, plan, ntk_tokens))


def decode_hidden(
    model: Model,
    pool: LatentPool,
    ids_B: Tensor,
    positions_B: Tensor,
    plan: DecodePlan,
    ntk_tokens: Tensor | int,
) -> Tensor:
    """Write the new tokens' rows into the pool and return the last layer's output hidden_BD.

    Args:
        ids_B: int64, the last token of each sequence; its row is not in the pool yet.
        positions_B: int64, its position; the plan's length is one more.
        plan: of this step; says where the rows go. A paged plan may have rows without a sequence.
        ntk_tokens: current length, per sequence or one for all; only dynamic NTK reads it.
    """
    rope = model.rope(positions_B, ntk_tokens)
    hidden_BD = model.embed(ids_B)
    scale, latent_width = model.softmax_scale, model.config.kv_lora_rank
    for number, layer in enumerate(model.layers):
        q_BNW = _queries(layer, pool, number, hidden_BD, rope, plan)
        out_BNC = mla_decode(q_BNW, pool.layer(number), plan, scale=scale, latent_width=latent_width)
        if plan.paged is not None:
            hidden_BD = layer.finish_latent(hidden_BD, out_BNC)
        else:
            hidden_BD = layer.finish(hidden_BD, layer.unabsorb(out_BNC))
    return hidden_BD


def _queries(
    layer: Layer, pool: LatentPool, number: int, hidden_BD: Tensor, rope: RopeTables, plan: DecodePlan
) -> Tensor:
    """Return the new tokens' absorbed queries q_BNW and store their rows."""
    if plan.paged is not None:
        return layer.query_and_store(hidden_BD, rope, plan.slots_B, pool.rows(number))
    projected = layer.project(hidden_BD, rope)
    pool.write(number, plan.slots_B, projected.rows_TW)
    return layer.absorb(projected.q_TNK)
