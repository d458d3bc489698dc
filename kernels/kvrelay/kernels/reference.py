"""The fp32 oracle of every kernel: plain, slow, and what the others are compared with.

Shapes in this file: B sequences, T query tokens, S keys, N heads, K = nope + R query/key width, V value width,
C latent, R rope, W = C + R.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attend_block(q_TNK: Tensor, k_SNK: Tensor, v_SNV: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Contract of `mla_prefill.attend_block`."""
    scores_NTS = torch.einsum("tnk,snk->nts", q_TNK.double(), k_SNK.double()) * scale
    if causal:
        hidden_TS = torch.ones(scores_NTS.shape[1:], dtype=torch.bool, device=scores_NTS.device).triu(1)
        scores_NTS = scores_NTS.masked_fill(hidden_TS, -torch.inf)
    lse_NT = scores_NTS.logsumexp(-1)
    out_TNV = torch.einsum("nts,snv->tnv", (scores_NTS - lse_NT[..., None]).exp(), v_SNV.double())
    return out_TNV.float(), lse_NT.transpose(0, 1).float()


def mla_decode(
    q_BNW: Tensor,
    pool_PSW: Tensor,
    page_tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    scale: float,
    latent_width: int,
) -> Tensor:
    """Contract of `mla_decode.mla_decode`, one sequence at a time."""
    outs = []
    for q_NW, pages, length in zip(q_BNW, page_tables, lengths, strict=True):
        rows_SW = torch.cat([pool_PSW[page] for page in pages])[:length].double()
        weights_NS = (q_NW.double() @ rows_SW.T * scale).softmax(-1)
        outs.append(weights_NS @ rows_SW[:, :latent_width])
    return torch.stack(outs).float()


def apply_rope(x_TNR: Tensor, positions_T: Tensor, frequencies_F: Tensor) -> Tensor:
    """Rotate pairs (j, j + R/2) as complex numbers; contract of `rope.apply_rope` with tables of scale 1."""
    real, imaginary = x_TNR.double().chunk(2, dim=-1)
    turn_TF = torch.polar(torch.ones(()).double(), positions_T.double()[:, None] * frequencies_F.double())
    turned = torch.complex(real, imaginary) * turn_TF[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1).float()
