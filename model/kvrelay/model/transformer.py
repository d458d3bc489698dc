"""The model: embedding, layers, logits. It computes; pools, batches and requests are others' business.

Shapes in this file: T tokens whose queries are computed, S tokens whose latents are read, D hidden, N heads,
K query/key width, V value width, C latent, W = C + R (a row of the pool), and in `logits` V is the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvrelay.core.layout import PageLayout
from kvrelay.kernels.few_tokens_choice import few_tokens_refuse
from kvrelay.kernels.residual_norm import Norm, add_rms_norm, rms_norm
from kvrelay.kernels.rope import Rope, RopeTables
from kvrelay.model.config import ModelConfig
from kvrelay.model.mla import Attention, Projected
from kvrelay.model.moe import FeedForward

# A feed-forward layer widens its input many times over; longer inputs are taken in pieces. On GPUs large ones, so that
# each of many experts still gets enough rows to fill the device: 2.2 GB of temporaries with DeepSeek-V2-Lite's widths.
FEED_FORWARD_BLOCK_TOKENS = {"cpu": 4096, "cuda": 32_768}
# From here on the product with the output projection adds the residual. With fewer tokens launches matter more.
PRODUCT_ADDS_TOKENS = 4096
# Logits of many tokens are computed this many at a time: 64 MiB in fp32.
LOGITS_BLOCK_NUMBERS = 1 << 24


class Layer:
    """One transformer layer, cut where the attention kernel and the pool come in."""

    def __init__(
        self, attention: Attention, feed_forward: FeedForward, *, input_norm_D: Tensor, post_norm_D: Tensor, eps: float
    ) -> None:
        self._attention = attention
        self._feed_forward = feed_forward
        self._input_norm_D = input_norm_D
        self._post_norm_D = post_norm_D
        self._eps = eps

    def project(self, hidden_TD: Tensor, rope: RopeTables) -> Projected:
        """Return q_TNK (rope part rotated) and rows_TW (what is cached); rows are final."""
        return self._attention.project(F.rms_norm(hidden_TD, hidden_TD.shape[-1:], self._input_norm_D, self._eps), rope)

    def project_and_store(self, hidden_TD: Tensor, rope: RopeTables, slots_T: Tensor, pool_SY: Tensor) -> Tensor:
        """Return q_TNK as `project` does and store the rows in a layer's pool. Needs Triton."""
        normed_TD = rms_norm(hidden_TD, self._input_norm_D, self._eps)
        return self._attention.project_and_store(normed_TD, rope, slots_T, pool_SY)

    def query_and_store(self, hidden_TD: Tensor, rope: RopeTables, slots_T: Tensor, pool_SW: Tensor) -> Tensor:
        """Return absorbed queries q_TNW and store the rows in the layer's pool; see `Attention.project_into`."""
        if self._takes_few(hidden_TD):
            norm = Norm(self._input_norm_D, self._eps)
            return self._attention.query_few(hidden_TD, norm, rope, slots_T, pool_SW)
        normed_TD = rms_norm(hidden_TD, self._input_norm_D, self._eps)
        return self._attention.project_into(normed_TD, rope, slots_T, pool_SW)

    def finish_latent(self, hidden_TD: Tensor, out_TNC: Tensor) -> Tensor:
        """Return the layer's output from its input and its attention, which is still in latent space."""
        if not self._takes_few(hidden_TD):
            return self.finish(hidden_TD, self.unabsorb(out_TNC))
        if self._feed_forward.few_refuses() is None:
            arrived_T = torch.empty(len(hidden_TD), dtype=torch.int32, device=hidden_TD.device)
            hidden_TD = self._attention.output_few(hidden_TD, out_TNC, clears_T=arrived_T)
            return self._feed_forward.add_few(hidden_TD, Norm(self._post_norm_D, self._eps), arrived_T)
        hidden_TD = self._attention.output_few(hidden_TD, out_TNC)
        return hidden_TD + self._feed_forward(F.rms_norm(hidden_TD, hidden_TD.shape[-1:], self._post_norm_D, self._eps))

    def _takes_few(self, hidden_TD: Tensor) -> bool:
        refusal = few_tokens_refuse(hidden_TD.device.type, len(hidden_TD)) or self._attention.few_refuses()
        return refusal is None

    def expand(self, rows_SW: Tensor) -> tuple[Tensor, Tensor]:
        """Return (k_SNK, v_SNV) of cached rows."""
        return self._attention.expand(rows_SW)

    def attend(self, q_TNK: Tensor, rows_SW: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out_TNV, lse_TN) over cached rows that every query sees; lse_TN fp32."""
        return self._attention.attend(q_TNK, rows_SW, scale=scale)

    def absorb(self, q_TNK: Tensor) -> Tensor:
        """Return q_TNW, which is multiplied with cached rows directly."""
        return self._attention.absorb(q_TNK)

    def unabsorb(self, out_TNC: Tensor) -> Tensor:
        """Return out_TNV of an attention output over latents."""
        return self._attention.unabsorb(out_TNC)

    def finish(self, hidden_TD: Tensor, attn_TNV: Tensor) -> Tensor:
        """Return the layer's output from its input and its attention: output projection, feed-forward, residuals.

        Args:
            hidden_TD: may be overwritten.
        """
        if hidden_TD.is_cuda and len(hidden_TD) >= PRODUCT_ADDS_TOKENS and self._attention.few_refuses() is None:
            self._attention.add_output(hidden_TD, attn_TNV)
            normed_TD = rms_norm(hidden_TD, self._post_norm_D, self._eps)
        else:
            attended_TD = self._attention.output(attn_TNV)
            hidden_TD, normed_TD = add_rms_norm(hidden_TD, attended_TD, self._post_norm_D, self._eps)
        block_tokens = FEED_FORWARD_BLOCK_TOKENS[hidden_TD.device.type]
        if hidden_TD.shape[0] <= block_tokens:
            self._feed_forward.add_to(hidden_TD, normed_TD)
            return hidden_TD
        for block_TD, block_normed_TD in zip(
            torch.split(hidden_TD, block_tokens), torch.split(normed_TD, block_tokens), strict=True
        ):
            self._feed_forward.add_to(block_TD, block_normed_TD)
        return hidden_TD


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A loaded checkpoint; immutable, so any thread may compute with it."""

    config: ModelConfig
    model_id: str
    dtype: torch.dtype
    device: torch.device
    layers: tuple[Layer, ...]
    embedding_VD: Tensor
    final_norm_D: Tensor
    head_VD: Tensor  # the embedding itself when they are tied
    rotary: Rope

    @property
    def softmax_scale(self) -> float:
        """Factor on the scores; includes YaRN's."""
        return self.config.softmax_scale

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return hidden_TD of int64 token ids on the model's device."""
        return F.embedding(ids_T, self.embedding_VD)

    def rope(self, positions_T: Tensor, ntk_tokens_T: Tensor | int) -> RopeTables:
        """Return the rope tables of tokens, used by all layers of a step; see `Rope.tables`."""
        return self.rotary.tables(positions_T, ntk_tokens_T)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits_TV, fp32, of the last layer's output."""
        normed_TD = F.rms_norm(hidden_TD, hidden_TD.shape[-1:], self.final_norm_D, self.config.rms_norm_eps)
        return F.linear(normed_TD, self.head_VD).float()

    def best(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits_TV, fp32, their maxima, which are not finite where a logit is not, and where those are."""
        if few_tokens_refuse(hidden_TD.device.type, len(hidden_TD)) is None:
            from kvrelay.kernels.few_tokens import head  # noqa: PLC0415 - CPUs need no Triton

            return head(hidden_TD, Norm(self.final_norm_D, self.config.rms_norm_eps), self.head_VD)
        logits_TV = self.logits(hidden_TD)
        return logits_TV, *logits_TV.max(-1)

    def logprobs(self, hidden_TD: Tensor, next_ids_T: Tensor) -> Tensor:
        """Return the natural-log probability, fp32 [T], of the token that follows each of T tokens.

        Args:
            hidden_TD: the last layer's output.
            next_ids_T: int64, the tokens that follow, on the model's device.
        """
        rows = max(1, LOGITS_BLOCK_NUMBERS // self.head_VD.shape[0])
        blocks = zip(torch.split(hidden_TD, rows), torch.split(next_ids_T, rows), strict=True)
        return torch.cat([-F.cross_entropy(self.logits(hidden), ids, reduction="none") for hidden, ids in blocks])

    def layout(self, *, block_tokens: int, page_tokens: int = 64, latent_format: str = "model") -> PageLayout:
        """Return the byte map of this model's pages.

        Raises:
            ValueError: this model has no rows of that format; names the value and the limit.
        """
        return PageLayout(
            num_layers=self.config.num_layers,
            latent_width=self.config.kv_lora_rank,
            rope_width=self.config.rope_width,
            dtype=self.dtype_name,
            model_id=self.model_id,
            page_tokens=page_tokens,
            block_tokens=block_tokens,
            latent_format=latent_format,
        )
