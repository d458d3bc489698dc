"""Joining attention over disjoint key sets.

Shapes in this file: T query tokens, N heads, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrelay.kernels.triton_support import triton_refuses


def merge_in_place(out_a_TNV: Tensor, lse_a_TN: Tensor, out_b_TNV: Tensor, lse_b_TN: Tensor) -> None:
    """Store the merge of two partials in the first one; see `merge_partials`. On GPUs one pass over memory.

    Args:
        out_b_TNV, lse_b_TN: any float dtype and strides, as an attention kernel returned them.
    """
    if out_a_TNV.is_cuda:
        from kvrelay.kernels.triton_layer import merge_into  # noqa: PLC0415 - CPUs need no Triton

        merge_into(out_a_TNV, lse_a_TN, out_b_TNV, lse_b_TN, out_a_TNV, lse_a_TN)
        return
    out_TNV, lse_TN = merge_partials(out_a_TNV, lse_a_TN, out_b_TNV, lse_b_TN)
    out_a_TNV.copy_(out_TNV)
    lse_a_TN.copy_(lse_TN)


def merge_partials(out_a_TNV: Tensor, lse_a_TN: Tensor, out_b_TNV: Tensor, lse_b_TN: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over the union of two disjoint key sets.

    Args:
        out_a_TNV: any float dtype, already normalised over its own keys.
        lse_a_TN: fp32 natural-log normaliser; -inf where no key was visible.
        out_b_TNV: like out_a_TNV, over the other keys.
        lse_b_TN: like lse_a_TN.

    Returns:
        (out_TNV, lse_TN) fp32, equal to one softmax over all keys up to fp32 rounding. Associative, so ring order does
        not matter; rows with no key at all give 0 and -inf.

    Source: Milakov & Gimelshein 2018 (arXiv:1805.02867), in log space.
    """
    if out_a_TNV.is_cuda and triton_refuses("cuda") is None:
        from kvrelay.kernels.triton_merge import merge  # noqa: PLC0415 - optional

        return merge(out_a_TNV, lse_a_TN, out_b_TNV, lse_b_TN)
    lse_TN = torch.logaddexp(lse_a_TN, lse_b_TN)
    ref_TN = lse_TN.nan_to_num(neginf=0.0)  # -inf - -inf would be nan
    w_a_TN, w_b_TN = (lse_a_TN - ref_TN).exp(), (lse_b_TN - ref_TN).exp()
    out_TNV = torch.addcmul(out_a_TNV * w_a_TN[..., None], out_b_TNV.float(), w_b_TN[..., None])
    return out_TNV, lse_TN
