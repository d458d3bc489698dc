"""One new token per sequence against its paged latents, with absorbed queries.

Shapes in this file: B sequences of the batch, G sequences of a group, P pages, S rows (of a page, of a sequence, or of
a block), N heads, C latent, R rope, W = C + R.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvrelay.kernels import quant
from kvrelay.kernels.cuda_choice import cuda_decode_refuses, heads_decode_refuses, narrow_decode_refuses
from kvrelay.kernels.dispatch import Backend, choose
from kvrelay.kernels.flashmla import Attend, flashmla_is_slower, flashmla_refuses, load_flashmla
from kvrelay.kernels.merge import merge_partials
from kvrelay.kernels.paged_plan import PagedPlan
from kvrelay.kernels.triton_support import triton_refuses

# A sequence joins a group when its padding is at most an eighth of the group's longest table, or so short that
# another launch would cost more than the padding.
MAX_PADDING = 0.125
FREE_PADDING_TOKENS = 256
# Bytes of one block of gathered rows, over all sequences of a group: read twice, so it should stay in the cache.
BLOCK_BYTES = 4 << 20

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of similar length, neighbours in the plan's order, processed together."""

    start: int  # rows [start, end) of the plan's order
    end: int
    slots_GS: Tensor  # int64 row of the pool; behind a sequence's end its own first row, so never a row of others
    bias_G1S: Tensor  # fp32, added to the scores: 0 where visible, -inf behind the end
    run: int | None  # first slot, when the group is one sequence in consecutive pages: nothing to gather


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Made once per step from page tables and lengths; used by all layers."""

    groups: tuple[Group, ...]  # none where only `paged` is given
    order_B: Tensor | None  # int64: sequence of each row, longest first; None = as they come
    inverse_B: Tensor | None  # int64: row of each sequence
    slots_B: Tensor  # int64: where this step's row of each sequence is written
    lengths_B: Tensor  # int64 or int32: visible rows, this step's included
    paged: PagedPlan | None = None  # what the kernels of a GPU read

    @classmethod
    def make(
        cls, page_tables: Sequence[Tensor], lengths: Sequence[int], *, page_tokens: int, device: torch.device
    ) -> DecodePlan:
        """Plan one step.

        Args:
            page_tables: one int64 CPU tensor per sequence, its pages in token order; spare pages at the end are fine.
            lengths: visible rows per sequence, this step's row (position length - 1) included; at least 1.
        """
        if triton_refuses(device.type) is None:
            longest = max(-(-length // page_tokens) for length in lengths)
            paged = PagedPlan.allocate(
                num_sequences=len(lengths), max_pages=longest, page_tokens=page_tokens, device=device
            )
            paged.update_(page_tables, lengths)
            return cls.of(paged)
        return cls._gathering(page_tables, lengths, page_tokens=page_tokens, device=device)

    @classmethod
    def of(cls, paged: PagedPlan) -> DecodePlan:
        """Return the plan that reads `paged`'s buffers whenever it is used; make it once, refill `paged` per step."""
        return cls((), None, None, paged.slots_B, paged.lengths_B, paged)

    @classmethod
    def _gathering(
        cls, page_tables: Sequence[Tensor], lengths: Sequence[int], *, page_tokens: int, device: torch.device
    ) -> DecodePlan:
        sizes = np.asarray(lengths, dtype=np.int64)
        assert len(page_tables) == len(sizes) > 0, "one table per sequence, and at least one sequence"
        tables = [table.numpy() for table in page_tables]
        used = -(-sizes // page_tokens)
        order = np.argsort(-used, kind="stable")
        groups = tuple(
            _group(tables, sizes, order[start:end], start, page_tokens, device)
            for start, end in _split(used[order], FREE_PADDING_TOKENS // page_tokens)
        )
        last = sizes - 1
        pages = np.array([table[page] for table, page in zip(tables, last // page_tokens, strict=True)], np.int64)
        in_order = bool((order == np.arange(len(sizes))).all())
        return cls(
            groups=groups,
            order_B=None if in_order else torch.from_numpy(order).to(device),
            inverse_B=None if in_order else torch.from_numpy(np.argsort(order)).to(device),
            slots_B=torch.from_numpy(pages * page_tokens + last % page_tokens).to(device),
            lengths_B=torch.from_numpy(sizes).to(device),
        )

    def with_groups(self) -> DecodePlan:
        """Return this plan with groups, worked out on the host from `paged` where there are none; that waits for the
        device. Every sequence of the plan must be there."""
        if self.groups or self.paged is None:
            return self
        tables = list(self.paged.page_table_BP.cpu().long())
        made = self._gathering(
            tables,
            self.paged.lengths_B.tolist(),
            page_tokens=self.paged.page_tokens,
            device=self.lengths_B.device,
        )
        return replace(made, paged=self.paged)

    @property
    def gathered_rows(self) -> int:
        """Rows read per layer, padding included; the sum of the lengths is what must be read."""
        return sum(group.slots_GS.numel() for group in self.groups)


def _split(used_pages: Ints, free_padding_pages: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each group; `used_pages` descends."""
    start = 0
    for row, pages in enumerate(used_pages.tolist()):
        longest = int(used_pages[start])
        if longest - pages > max(MAX_PADDING * longest, free_padding_pages):
            yield start, row
            start = row
    yield start, len(used_pages)


def _group(
    tables: Sequence[Ints], sizes: Ints, members: Ints, start: int, page_tokens: int, device: torch.device
) -> Group:
    longest = int(sizes[members].max())
    pages = np.zeros((len(members), -(-longest // page_tokens)), np.int64)
    for row, member in enumerate(members):
        count = -(-sizes[member] // page_tokens)
        pages[row, :count] = tables[member][:count]
    pages_GP = torch.from_numpy(pages).to(device)
    lengths_G1 = torch.from_numpy(sizes[members]).to(device)[:, None]
    alone = len(members) == 1 and bool((np.diff(pages[0]) == 1).all())
    rows = torch.arange(page_tokens, device=device)
    slots_GS = (pages_GP[..., None] * page_tokens + rows).flatten(1)[:, :longest]
    hidden_GS = torch.arange(longest, device=device) >= lengths_G1
    # Rows behind the end may hold anything, not-a-number included, which even a weight of 0 would let through.
    slots_GS = torch.where(hidden_GS, slots_GS[:, :1], slots_GS)
    bias_GS = torch.zeros(hidden_GS.shape, device=device).masked_fill_(hidden_GS, -torch.inf)
    run = int(pages[0, 0]) * page_tokens if alone else None
    return Group(start, start + len(members), slots_GS, bias_GS[:, None], run)


class MlaDecode(Protocol):
    def __call__(
        self, q_BNW: Tensor, pool_PSW: Tensor, plan: DecodePlan, *, scale: float, latent_width: int
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Problem:
    device: str  # torch device type
    dtype: torch.dtype  # of the pool; uint8 = quantised rows
    num_heads: int
    latent_width: int  # C
    row_width: int  # W
    num_sequences: int  # of a step; what is recorded for a batch size serves all lengths
    page_tokens: int = 64


def mla_decode(q_BNW: Tensor, pool_PSW: Tensor, plan: DecodePlan, *, scale: float, latent_width: int) -> Tensor:
    """Return attention of one query per sequence over its latents.

    Args:
        q_BNW: absorbed queries, then rotated rope queries.
        pool_PSW: one layer of the pool; this step's rows are already written. Rows of `quant` are uint8.
        plan: of this step.
        latent_width: C; values are the first C numbers of a row.

    Returns:
        out_BNC in the dtype of `q_BNW`, accumulated in fp32, still in latent space.
    """
    num_sequences, num_heads, row_width = q_BNW.shape
    problem = Problem(
        q_BNW.device.type, pool_PSW.dtype, num_heads, latent_width, row_width, num_sequences, pool_PSW.shape[1]
    )
    kernel = kernel_for(problem)
    return kernel(q_BNW, pool_PSW, plan, scale=scale, latent_width=latent_width)


@functools.cache
def kernel_for(problem: Problem, wanted: str = "auto") -> MlaDecode:
    """Return the chosen backend's function; the choice is made and logged once per problem."""
    return choose("mla_decode", BACKENDS, problem, wanted).load()


def _gathered(q_BNW: Tensor, pool_PSW: Tensor, plan: DecodePlan, *, scale: float, latent_width: int) -> Tensor:
    """Gather the rows of a group block by block, then plain batched matmuls; runs anywhere."""
    plan = plan.with_groups()
    dtype, q_BNW = q_BNW.dtype, q_BNW.float()
    if plan.order_B is not None:
        q_BNW = q_BNW.index_select(0, plan.order_B)
    rows_W = pool_PSW.flatten(0, 1)
    outs = [_attend_group(q_BNW[group.start : group.end], rows_W, group, scale, latent_width) for group in plan.groups]
    out_BNC = (outs[0] if len(outs) == 1 else torch.cat(outs)).to(dtype)
    return out_BNC if plan.inverse_B is None else out_BNC.index_select(0, plan.inverse_B)


def _attend_group(q_GNW: Tensor, rows_W: Tensor, group: Group, scale: float, latent_width: int) -> Tensor:
    num_sequences, num_rows = group.slots_GS.shape
    row_width = q_GNW.shape[-1]
    step = max(64, BLOCK_BYTES // (4 * num_sequences * row_width))
    out, lse = None, None
    for start in range(0, num_rows, step):
        if group.run is None:
            kv_W = rows_W.index_select(0, group.slots_GS[:, start : start + step].reshape(-1))
        else:
            kv_W = rows_W[group.run + start : group.run + min(start + step, num_rows)]
        if kv_W.dtype == torch.uint8:
            kv_W = quant.dequantise(kv_W, latent_width=latent_width)
        kv_GSW = kv_W.float().view(num_sequences, -1, row_width)
        bias_G1S = group.bias_G1S[..., start : start + step]
        scores_GNS = torch.baddbmm(bias_G1S, q_GNW, kv_GSW.transpose(1, 2), alpha=scale)
        part_GNC = torch.bmm(scores_GNS.softmax(-1), kv_GSW[..., :latent_width])
        if num_rows <= step:
            return part_GNC
        # A block wholly behind a sequence's end is all -inf: its softmax is not a number, its weight must be none.
        part = part_GNC.nan_to_num_(nan=0.0), scores_GNS.logsumexp(-1)
        out, lse = part if out is None or lse is None else merge_partials(out, lse, *part)
    assert out is not None, "a sequence has at least one row"
    return out


def _triton_refuses(problem: Problem) -> str | None:
    return triton_refuses(problem.device)


def _load_triton() -> MlaDecode:
    from kvrelay.kernels import triton_decode  # noqa: PLC0415 - optional

    return _of_paged(triton_decode.decode)


def _cuda_refuses(problem: Problem) -> str | None:
    return cuda_decode_refuses(
        problem.device, problem.dtype, problem.latent_width, problem.row_width, problem.page_tokens
    )


def _load_cuda() -> MlaDecode:
    from kvrelay.kernels import cuda_decode  # noqa: PLC0415 - optional

    return _of_paged(cuda_decode.decode)


def _shape(problem: Problem) -> tuple[str, torch.dtype, int, int, int, int]:
    """Return what kernels over bf16 rows are asked about."""
    heads, latent_width, row_width = problem.num_heads, problem.latent_width, problem.row_width
    return problem.device, problem.dtype, heads, latent_width, row_width, problem.page_tokens


def _load_narrow() -> MlaDecode:
    from kvrelay.kernels import pages_decode  # noqa: PLC0415 - optional

    return _of_paged(pages_decode.NARROW.decode)


def _load_heads() -> MlaDecode:
    from kvrelay.kernels import pages_decode  # noqa: PLC0415 - optional

    return _of_paged(pages_decode.HEADS.decode)


def _flashmla_refuses(problem: Problem) -> str | None:
    return flashmla_refuses(*_shape(problem))


def _flashmla_refuses_or_is_slower(problem: Problem) -> str | None:
    return flashmla_is_slower(problem.num_heads, problem.num_sequences) or _flashmla_refuses(problem)


def _load_flashmla() -> MlaDecode:
    return _of_paged(load_flashmla())


def _of_paged(attend: Attend) -> MlaDecode:
    """Return a kernel that reads paged plans as one that takes a step's plan."""

    def run(q_BNW: Tensor, pool_PSW: Tensor, plan: DecodePlan, *, scale: float, latent_width: int) -> Tensor:
        assert plan.paged is not None, "this kernel reads a paged plan"
        return attend(q_BNW, pool_PSW, plan.paged, scale=scale, latent_width=latent_width)

    return run


BACKENDS: tuple[Backend[Problem, MlaDecode], ...] = (  # best first; the last never refuses
    Backend("flashmla", _flashmla_refuses_or_is_slower, _load_flashmla),
    Backend("cuda", _cuda_refuses, _load_cuda),
    Backend("narrow", lambda problem: narrow_decode_refuses(*_shape(problem)), _load_narrow),
    Backend("heads", lambda problem: heads_decode_refuses(*_shape(problem)), _load_heads),
    Backend("flashmla", _flashmla_refuses, _load_flashmla),  # where ours cannot be compiled
    Backend("triton", _triton_refuses, _load_triton),
    Backend("torch", lambda _: None, lambda: _gathered),
)
