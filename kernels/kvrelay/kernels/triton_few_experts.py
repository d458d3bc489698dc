"""Experts of few tokens: two kernels that stream the chosen experts' weights once, with routing in the first of them.

Experts that every token goes to are known beforehand. So the first kernel begins with those, while some of its programs
work out the router's logits and one chooses; by the time the others need the choice, it is there.

Shapes in this file: T tokens, D hidden, E experts chosen among, K experts of a token (those that always come last),
I expert width, O outputs, X experts of a token or parts of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrelay.kernels.triton_few import normed_row
from kvrelay.kernels.triton_wait import let_next_begin, wait_for_previous


@triton.jit
def _columns(
    gate_up_ptr, expert, block, wanted, hidden: tl.constexpr, width: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return some rows of an expert's gate and up projections, zeros where not wanted."""
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    col = tl.arange(0, BLOCK)
    mask = (column < tl.where(wanted, width, 0))[:, None] & (col < hidden)[None, :]
    expert_ptr = gate_up_ptr + expert.to(tl.int64) * (2 * width * hidden)
    at = column.to(tl.int64)[:, None] * hidden + col[None, :]
    gate = tl.load(expert_ptr + at, mask, other=0.0)
    return gate, tl.load(expert_ptr + width * hidden + at, mask, other=0.0)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _store_gated(out_ptr, block, x, gate, up, width: tl.constexpr, COLUMNS: tl.constexpr):
    """Store silu(gate . x) * (up . x), the products rounded first, as the other paths do."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    gate_O, up_O = tl.reduce((gate.to(tl.float32) * x[None, :], up.to(tl.float32) * x[None, :]), 1, _add_both)
    gate_O, up_O = gate_O.to(dtype).to(tl.float32), up_O.to(dtype).to(tl.float32)
    tl.store(out_ptr + column, (gate_O / (1 + tl.exp(-gate_O)) * up_O).to(dtype), column < width)


@triton.jit
def _choose(
    logits_ptr, ids_ptr, weights_ptr, scale, E: tl.constexpr, E_BLOCK: tl.constexpr, TOP: tl.constexpr,
    NORMALISE: tl.constexpr,
):  # fmt: skip
    """Store the experts of the largest softmax scores, best first, and their weights."""
    expert_E = tl.arange(0, E_BLOCK)
    # Other programs have just written them, so not from this processor's own cache.
    logit_E = tl.load(logits_ptr + expert_E, expert_E < E, other=-float("inf"), cache_modifier=".cg")
    score_E = tl.exp(logit_E - tl.max(logit_E, 0))
    score_E = score_E / tl.sum(score_E, 0)
    # Not-a-number gets a rank as well, so that every place has an expert.
    order_E = tl.where(expert_E < E, tl.where(score_E >= 0, score_E, -1.0), -2.0)
    mine, others = tl.expand_dims(order_E, 0), tl.expand_dims(order_E, 1)
    before = (others > mine) | ((others == mine) & (expert_E[:, None] < expert_E[None, :]))
    rank_E = tl.sum(before.to(tl.int32), 0)
    if NORMALISE:
        score_E = score_E / (tl.sum(tl.where(rank_E < TOP, score_E, 0.0), 0) + 1e-20)
    tl.store(ids_ptr + rank_E, expert_E, rank_E < TOP)
    tl.store(weights_ptr + rank_E, score_E * scale, rank_E < TOP)


@triton.jit
def gate_up_kernel(
    hidden_ptr, norm_ptr, router_ptr, logits_ptr, arrived_ptr, gate_up_ptr, ids_ptr, weights_ptr, gated_ptr, eps, scale,
    hidden: tl.constexpr, width: tl.constexpr, E: tl.constexpr, E_BLOCK: tl.constexpr, TOP: tl.constexpr,
    ALWAYS: tl.constexpr, NORMALISE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Norm the token, choose its experts, and give all their gated columns [K, I].

    A token's programs share the columns evenly, those of the experts that every token goes to first, and each asks for
    its next columns before it stores what it has. `arrived` counts the router's logits, plus one for the choice: what
    programs wait for comes from those with the lowest numbers, which are the first to run.
    ALONE: programs run one after the other, so each works out all logits.
    """
    program, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    programs = tl.num_programs(0)
    col = tl.arange(0, BLOCK)
    blocks: tl.constexpr = (width + COLUMNS - 1) // COLUMNS
    known: tl.constexpr = ALWAYS * blocks
    total: tl.constexpr = (ALWAYS + TOP) * blocks
    gated_ptr += token * (TOP + ALWAYS) * width
    ids_ptr += token * TOP
    arrived_ptr += token
    # The lowest numbers, which route as well, get the last columns, of which there may be one less.
    tile = programs - 1 - program
    gate, up = _columns(gate_up_ptr, E + tile // blocks, tile % blocks, tile < known, hidden, width, COLUMNS, BLOCK)
    row, stride = program, programs
    if ALONE:
        row, stride = program * 0, programs * 0 + 1
    if E > 0:
        router = tl.load(router_ptr + row * hidden + col, col < tl.where(row < E, hidden, 0), other=0.0)
    wait_for_previous(PDL)
    x = normed_row(hidden_ptr + token * hidden, norm_ptr, col, hidden, eps, True)
    if E > 0:
        while row < E:
            tl.store(logits_ptr + token * E + row, tl.sum(router * x, 0))
            tl.debug_barrier()
            tl.atomic_add(arrived_ptr, 1, sem="release")
            row += stride
            router = tl.load(router_ptr + row * hidden + col, col < tl.where(row < E, hidden, 0), other=0.0)
        if program == 0:
            while tl.atomic_add(arrived_ptr, 0, sem="acquire") < E:
                pass
            tl.debug_barrier()
            _choose(logits_ptr + token * E, ids_ptr, weights_ptr + token * TOP, scale, E, E_BLOCK, TOP, NORMALISE)
            tl.debug_barrier()
            tl.atomic_add(arrived_ptr, 1, sem="acq_rel")
    while tile + programs < known:
        later = tile + programs
        expert = E + later // blocks
        next_gate, next_up = _columns(
            gate_up_ptr, expert, later % blocks, later < known, hidden, width, COLUMNS, BLOCK
        )  # fmt: skip
        _store_gated(gated_ptr + (TOP + tile // blocks) * width, tile % blocks, x, gate, up, width, COLUMNS)
        gate, up = next_gate, next_up
        tile = later
    if E > 0:
        while tl.atomic_add(arrived_ptr, 0, sem="acquire") <= E:
            pass
        tl.debug_barrier()
        if tile >= known:
            expert = tl.load(ids_ptr + tl.minimum(tile // blocks - ALWAYS, TOP - 1))
            gate, up = _columns(gate_up_ptr, expert, tile % blocks, tile < total, hidden, width, COLUMNS, BLOCK)
    let_next_begin(PDL)
    while tile < total:
        later = tile + programs
        expert = tile * 0 + E
        if E > 0:
            expert = tl.load(ids_ptr + tl.minimum(later // blocks - ALWAYS, TOP - 1))
        next_gate, next_up = _columns(
            gate_up_ptr, expert, later % blocks, later < total, hidden, width, COLUMNS, BLOCK
        )  # fmt: skip
        place = tile // blocks
        number = tl.where(place < ALWAYS, TOP + place, place - ALWAYS)
        _store_gated(gated_ptr + number * width, tile % blocks, x, gate, up, width, COLUMNS)
        gate, up = next_gate, next_up
        tile = later


@triton.jit
def down_kernel(
    gated_ptr, ids_ptr, weights_ptr, down_ptr, add_ptr, out_ptr, first_always,
    hidden: tl.constexpr, width: tl.constexpr, TOP: tl.constexpr, ALWAYS: tl.constexpr, X: tl.constexpr,
    PARTS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out = add + the weighted sum of the token's experts' second products, summed in fp32.

    One warp for each expert, or for each of its PARTS of SPAN numbers: its product is one of a matrix with one column.
    """
    let_next_begin(PDL)
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    place_X = tl.arange(0, X) // PARTS
    first_X = tl.arange(0, X) % PARTS * SPAN
    inside_X = place_X < TOP + ALWAYS
    wait_for_previous(PDL)
    chosen_X = tl.load(ids_ptr + token * TOP + place_X, place_X < TOP, other=0)
    expert_X = tl.where(place_X < TOP, chosen_X, first_always + place_X - TOP)
    weight_X = tl.load(weights_ptr + token * TOP + place_X, place_X < TOP, other=1.0)
    before = tl.load(add_ptr + token * hidden + row, row < hidden, other=0.0)
    at_X1O = (expert_X.to(tl.int64) * (hidden * width) + first_X)[:, None, None] + (row.to(tl.int64) * width)[
        None, :, None
    ]
    gated_at_X = (token * (TOP + ALWAYS) + place_X) * width + first_X
    total = tl.zeros([X, ROWS, 1], tl.float32)
    for start in tl.range(0, SPAN, DEPTH, num_stages=STAGES):
        # A mask that is one for all of a load lets it go through shared memory, several turns ahead.
        here = inside_X[:, None] & (start + depth < SPAN)[None, :]
        if width < PARTS * SPAN:
            here = here & (first_X[:, None] + start + depth[None, :] < width)
        mask = here[:, None, :] & (row < hidden)[None, :, None]
        tile = tl.load(down_ptr + at_X1O + (start + depth)[None, None, :], mask, other=0.0)
        gated = tl.load(gated_ptr + gated_at_X[:, None] + start + depth[None, :], here, other=0.0)
        total = tl.dot(tile, gated[:, :, None], total, input_precision="ieee")
    # Warps of no expert have zeros, and a weight of theirs must not make them not-a-number.
    weighted = tl.where(inside_X[:, None, None], total * weight_X[:, None, None], 0.0)
    sum_O = tl.sum(tl.sum(weighted, 0), 1).to(out_ptr.dtype.element_ty)
    sum_O = (before.to(tl.float32) + sum_O.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * hidden + row, sum_O, row < hidden)
