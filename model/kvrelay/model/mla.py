"""Multi-head latent attention: the projections around the attention kernels.

Shapes in this file: T tokens whose queries are computed, S tokens whose latents are read, D hidden, N heads,
P nope (unrotated) width per head, R rope width, K = P + R, V value width, C latent, W = C + R (a row of the pool),
Q width of the query projection's first step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvrelay.kernels.mla_prefill import attend_block
from kvrelay.kernels.residual_norm import Norm
from kvrelay.kernels.rope import RopeTables, apply_rope
from kvrelay.kernels.triton_support import triton_refuses
from kvrelay.model.config import ModelConfig

LATENT_NORM_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Weights of one layer; rope rows are half-split."""

    # One product gives the query (or its low-rank first step) and the latent and the rope key: [Q + W, D].
    in_proj: Tensor
    in_bias: Tensor | None
    q_norm: Tensor | None  # [Q]; None when queries come from one projection
    q_up: Tensor | None  # [N * K, Q]; likewise
    kv_norm_C: Tensor
    kv_up: Tensor  # [N * (P + V), C]: per head, key rows then value rows
    key_up_NPC: Tensor  # the same numbers, split; views of one copy
    value_up_NCV: Tensor
    # On GPUs, where one product expands cached rows: [N * (K + V), W], see `expansion`.
    expand: Tensor | None
    out_proj: Tensor  # [D, N * V]
    out_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Projected:
    """What a token's hidden state becomes before attention."""

    q_TNK: Tensor  # nope part, then rotated rope part
    rows_TW: Tensor  # normalised latent, then rotated rope key: what is cached and relayed


def expansion(by_head: Tensor, config: ModelConfig) -> Tensor:
    """Return the weight [N * (K + V), W] whose product with cached rows is their keys and values, head after head.

    To the rope part it is 1 on the diagonal of every head's keys, which copies exactly: for two fifths more arithmetic
    nothing else writes keys and values.

    Args:
        by_head: [N, P + V, C], per head key rows, then value rows.
    """
    nope_width, rope_width = config.nope_width, config.rope_width
    made = by_head.new_zeros(config.num_heads, config.key_width + config.value_width, config.kv_lora_rank + rope_width)
    made[:, :nope_width, : config.kv_lora_rank] = by_head[:, :nope_width]
    made[:, nope_width : config.key_width, config.kv_lora_rank :] = torch.eye(rope_width)
    made[:, config.key_width :, : config.kv_lora_rank] = by_head[:, nope_width:]
    return made.flatten(0, 1)


class Attention:
    """One layer's attention, but for the softmax itself."""

    def __init__(self, config: ModelConfig, weights: AttentionWeights) -> None:
        self._weights = weights
        self._num_heads = config.num_heads
        self._nope_width = config.nope_width
        self._rope_width = config.rope_width
        self._value_width = config.value_width
        self._latent_width = config.kv_lora_rank

    def project(self, normed_TD: Tensor, rope: RopeTables) -> Projected:
        """Return queries and cache rows of tokens whose hidden states are already normalised."""
        q_TNK, latent_TC, key_TR = self._products(normed_TD)
        nope_width, norm_C = self._nope_width, self._weights.kv_norm_C
        if normed_TD.is_cuda and triton_refuses("cuda") is None:
            from kvrelay.kernels.triton_rows import write_rows  # noqa: PLC0415 - optional

            rows_TW = latent_TC.new_empty(len(latent_TC), self._latent_width + self._rope_width)
            slots_T = torch.arange(len(rows_TW), device=rows_TW.device)
            write_rows(
                latent_TC, key_TR, norm_C=norm_C, eps=LATENT_NORM_EPS, tables=rope, slots_T=slots_T, pool=rows_TW,
                turn=(q_TNK[..., nope_width:], q_TNK[..., nope_width:]),
            )  # fmt: skip
            return Projected(q_TNK, rows_TW)
        latent_TC = F.rms_norm(latent_TC, latent_TC.shape[-1:], norm_C, LATENT_NORM_EPS)
        turned_TNR = apply_rope(q_TNK[..., nope_width:], rope)
        return Projected(
            q_TNK=torch.cat((q_TNK[..., :nope_width], turned_TNR), -1),
            rows_TW=torch.cat((latent_TC, apply_rope(key_TR, rope)), -1),
        )

    def project_and_store(self, normed_TD: Tensor, rope: RopeTables, slots_T: Tensor, pool_SY: Tensor) -> Tensor:
        """Return queries q_TNK and store the cache rows in a layer's pool, in one pass over both. Needs Triton."""
        from kvrelay.kernels.triton_rows import write_rows  # noqa: PLC0415 - optional

        q_TNK, latent_TC, key_TR = self._products(normed_TD)
        turned_TNR = q_TNK[..., self._nope_width :]
        write_rows(
            latent_TC, key_TR, norm_C=self._weights.kv_norm_C, eps=LATENT_NORM_EPS, tables=rope, slots_T=slots_T,
            pool=pool_SY, turn=(turned_TNR, turned_TNR),
        )  # fmt: skip
        return q_TNK

    def project_into(self, normed_TD: Tensor, rope: RopeTables, slots_T: Tensor, pool_SW: Tensor) -> Tensor:
        """Return absorbed queries q_TNW, and store the cache rows in a layer's pool; slot -1 stores nothing.

        Needs Triton.
        """
        from kvrelay.kernels.triton_rows import write_rows  # noqa: PLC0415 - optional

        q_TNK, latent_TC, key_TR = self._products(normed_TD)
        num_tokens, heads, _ = q_TNK.shape
        q_TNW = q_TNK.new_empty(num_tokens, heads, self._latent_width + self._rope_width)
        absorbed_NTC = q_TNW[..., : self._latent_width].transpose(0, 1)
        torch.bmm(q_TNK[..., : self._nope_width].transpose(0, 1), self._weights.key_up_NPC, out=absorbed_NTC)
        norm_C = self._weights.kv_norm_C
        write_rows(
            latent_TC, key_TR, norm_C=norm_C, eps=LATENT_NORM_EPS, tables=rope, slots_T=slots_T, pool=pool_SW,
            turn=(q_TNK[..., self._nope_width :], q_TNW[..., self._latent_width :]),
        )  # fmt: skip
        return q_TNW

    def few_refuses(self) -> str | None:
        """Return None, or the reason why `query_few` and `output_few` cannot run."""
        biased = self._weights.in_bias is not None or self._weights.out_bias is not None
        return "has biases" if biased else None

    def query_few(self, hidden_TD: Tensor, norm: Norm, rope: RopeTables, slots_T: Tensor, pool_SW: Tensor) -> Tensor:
        """Return absorbed queries q_TNW and store the cache rows, from hidden states that are not normalised yet."""
        from kvrelay.kernels.few_tokens import absorb_and_store, linear  # noqa: PLC0415 - CPUs need no Triton

        weights = self._weights
        q, latent_TC, key_TR = self._split(linear(hidden_TD, weights.in_proj, norm=norm))
        if weights.q_up is not None and weights.q_norm is not None:
            q = linear(q, weights.q_up, norm=Norm(weights.q_norm, LATENT_NORM_EPS))
        return absorb_and_store(
            q, latent_TC, key_TR, key_up_NPC=weights.key_up_NPC, norm=Norm(weights.kv_norm_C, LATENT_NORM_EPS),
            tables=rope, slots_T=slots_T, pool=pool_SW,
        )  # fmt: skip

    def output_few(self, hidden_TD: Tensor, out_TNC: Tensor, *, clears_T: Tensor | None = None) -> Tensor:
        """Return hidden + the layer's attention output, of attention that is still in latent space.

        Args:
            clears_T: see `few_tokens.linear`.
        """
        from kvrelay.kernels import few_tokens  # noqa: PLC0415

        values_TX = few_tokens.unabsorb(out_TNC, self._weights.value_up_NCV, hidden_TD.dtype)
        return few_tokens.linear(values_TX, self._weights.out_proj, add_TO=hidden_TD, clears_T=clears_T)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries (or their low-rank first step), latent_TC and key_TR of the first product."""
        row_width = self._latent_width + self._rope_width
        q, latent_TC, key_TR = mixed.split_with_sizes(
            [mixed.shape[-1] - row_width, self._latent_width, self._rope_width], dim=-1
        )
        return q, latent_TC, key_TR

    def _products(self, normed_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q_TNK, not rotated, latent_TC, not normalised, and key_TR, not rotated."""
        weights = self._weights
        q, latent_TC, key_TR = self._split(F.linear(normed_TD, weights.in_proj, weights.in_bias))
        if weights.q_up is not None and weights.q_norm is not None:
            q = F.linear(F.rms_norm(q, q.shape[-1:], weights.q_norm, LATENT_NORM_EPS), weights.q_up)
        return q.view(-1, self._num_heads, self._nope_width + self._rope_width), latent_TC, key_TR

    def expand(self, rows_SW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys k_SNK and values v_SNV that cached rows stand for."""
        if self._weights.expand is not None:
            key_width = self._nope_width + self._rope_width
            both = F.linear(rows_SW, self._weights.expand).view(len(rows_SW), self._num_heads, -1)
            return both[..., :key_width], both[..., key_width:]
        latent_SC, rope_SR = rows_SW.split_with_sizes([self._latent_width, self._rope_width], dim=-1)
        up = F.linear(latent_SC, self._weights.kv_up).view(-1, self._num_heads, self._nope_width + self._value_width)
        nope_SNP, v_SNV = up.split_with_sizes([self._nope_width, self._value_width], dim=-1)
        k_SNK = torch.cat((nope_SNP, rope_SR[:, None].expand(-1, self._num_heads, -1)), -1)
        return k_SNK, v_SNV

    def attend(self, q_TNK: Tensor, rows_SW: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out_TNV, lse_TN), as `attend_block` does, over cached rows that every query sees.

        Either the rows are expanded to keys and values, or the queries are absorbed and attend the rows themselves:
        whichever is less work. Both give the same up to rounding.
        """
        if not self._absorbs(q_TNK, num_rows=rows_SW.shape[0]):
            return attend_block(q_TNK, *self.expand(rows_SW), scale=scale, causal=False)
        num_queries, latent_width = q_TNK.shape[0], self._latent_width
        # The heads share the rows, so they are as many queries of one head.
        q_Q1W = self.absorb(q_TNK).flatten(0, 1)[:, None]
        rows_S1W = rows_SW[:, None]
        out_Q1C, lse_Q1 = attend_block(q_Q1W, rows_S1W, rows_S1W[..., :latent_width], scale=scale, causal=False)
        out_TNC = out_Q1C.view(num_queries, self._num_heads, latent_width)
        return self.unabsorb(out_TNC).float(), lse_Q1.view(num_queries, self._num_heads)

    def _absorbs(self, q_TNK: Tensor, *, num_rows: int) -> bool:
        """Say whether few enough queries see so many rows that expanding them is the larger part of the work.

        Per head, in multiply-adds: expanding takes S C (P + V) and attending T S (K + V); absorbing and its inverse
        take T C (P + V) and attending T S (W + C).
        """
        if q_TNK.device.type != "cpu":
            return False  # there the expansion runs in half precision on matrix units, the attention mostly not
        num_queries = q_TNK.shape[0]
        change = self._latent_width * (self._nope_width + self._value_width)
        row_width, key_width = self._latent_width + self._rope_width, self._nope_width + self._rope_width
        longer = row_width + self._latent_width - key_width - self._value_width
        return num_queries * (change + num_rows * longer) < num_rows * change

    def absorb(self, q_TNK: Tensor) -> Tensor:
        """Return q_TNW whose product with a cached row equals that of q_TNK with the row's expanded key."""
        latent_NTC = torch.bmm(q_TNK[..., : self._nope_width].transpose(0, 1), self._weights.key_up_NPC)
        return torch.cat((latent_NTC.transpose(0, 1), q_TNK[..., self._nope_width :]), -1)

    def unabsorb(self, out_TNC: Tensor) -> Tensor:
        """Return the values out_TNV of attention outputs that are still in latent space."""
        value_up_NCV = self._weights.value_up_NCV
        out_NTC = out_TNC.to(value_up_NCV.dtype).transpose(0, 1)
        if not out_TNC.is_cuda:
            return torch.bmm(out_NTC, value_up_NCV).transpose(0, 1)
        out_TNV = out_NTC.new_empty(len(out_TNC), self._num_heads, self._value_width)
        torch.bmm(out_NTC, value_up_NCV, out=out_TNV.transpose(0, 1))  # where the next product reads it
        return out_TNV

    def add_output(self, hidden_TD: Tensor, attn_TNV: Tensor) -> None:
        """Add the layer's attention output to hidden, in place: its product begins with what is there.

        The sum is rounded once. For layers without biases.
        """
        out_proj = self._weights.out_proj
        hidden_TD.addmm_(attn_TNV.to(out_proj.dtype).flatten(1), out_proj.T)

    def output(self, attn_TNV: Tensor) -> Tensor:
        """Return the layer's attention output [T, D]."""
        weights = self._weights
        return F.linear(attn_TNV.to(weights.out_proj.dtype).flatten(1), weights.out_proj, weights.out_bias)
