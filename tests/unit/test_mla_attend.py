"""Over cached rows, expanding the rows and absorbing the queries are one function, and the cheaper one runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvrelay.kernels.mla_prefill import attend_block
from kvrelay.model.checkpoint import load_model
from kvrelay.model.embedded_path import embedded_checkpoint
from kvrelay.model.mla import Attention, expansion
from kvrelay.model.transformer import Model


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(embedded_checkpoint(), dtype="float32", device=torch.device("cpu"))


def queries_and_rows(model: Model, num_queries: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q_TNK and rows_SW of tokens that the model could have seen."""
    ids_T = torch.arange(num_queries + num_rows) % model.config.vocab_size
    projected = model.layers[0].project(model.embed(ids_T), model.rope(torch.arange(len(ids_T)), len(ids_T)))
    return projected.q_TNK[num_rows:], projected.rows_TW[:num_rows]


@pytest.mark.parametrize("num_queries", [1, 50, 127, 400])
@torch.inference_mode()
def test_attention_over_cached_rows_is_that_over_their_keys_and_values(model: Model, num_queries: int) -> None:
    layer, scale = model.layers[0], model.softmax_scale
    q_TNK, rows_SW = queries_and_rows(model, num_queries, 1000)
    wanted_TNV, wanted_TN = attend_block(q_TNK, *layer.expand(rows_SW), scale=scale, causal=False)

    out_TNV, lse_TN = layer.attend(q_TNK, rows_SW, scale=scale)

    torch.testing.assert_close(out_TNV, wanted_TNV, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(lse_TN, wanted_TN, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("num_queries", "expands"), [(8, False), (400, True)])
@torch.inference_mode()
def test_rows_are_expanded_only_when_many_queries_share_the_work(model: Model, num_queries: int, expands: bool) -> None:
    layer = model.layers[0]
    q_TNK, rows_SW = queries_and_rows(model, num_queries, 1000)
    with FlopCounterMode(display=False) as expanding:
        layer.expand(rows_SW)

    with FlopCounterMode(display=False) as attending:
        layer.attend(q_TNK, rows_SW, scale=model.softmax_scale)

    assert (attending.get_total_flops() >= expanding.get_total_flops()) is expands


@torch.inference_mode()
def test_one_product_expands_rows_as_several_steps_do(model: Model) -> None:
    attention, config = model.layers[0]._attention, model.config
    _, rows_SW = queries_and_rows(model, 1, 50)
    by_head = attention._weights.kv_up.view(config.num_heads, -1, config.kv_lora_rank)
    weights = dataclasses.replace(attention._weights, expand=expansion(by_head, config))

    k_SNK, v_SNV = Attention(config, weights).expand(rows_SW)

    wanted_SNK, wanted_SNV = attention.expand(rows_SW)
    torch.testing.assert_close(k_SNK, wanted_SNK, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(v_SNV, wanted_SNV, atol=1e-5, rtol=1e-5)
    turned = slice(config.nope_width, None)
    assert torch.equal(k_SNK[..., turned], wanted_SNK[..., turned])  # copied, not computed
