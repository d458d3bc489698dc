"""Decode attention over random latents in scattered pages, ours beside FlashMLA's.

One measured work is a recorded step of several layers, each with rows of its own, so no layer finds its rows in the
cache. Per layer: the attention kernel, the join of its splits, and for FlashMLA its schedule in the first layer.

Shapes in this file: B sequences, P pages, S page_tokens, N heads, W = C + R.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvrelay.bench.kernel_timing import recorded, side_by_side
from kvrelay.core.layout import fp8_row_bytes
from kvrelay.kernels import mla_decode, quant
from kvrelay.kernels.dispatch import Backend, choose
from kvrelay.kernels.flashmla import flashmla_refuses, load_flashmla
from kvrelay.kernels.paged_plan import PagedPlan

LATENT, ROPE, PAGE = 512, 64, 64
SCALE = 0.1
STEP_BYTES = 4 << 30  # rows of all layers of a step: many times the cache
MAX_LAYERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    batch: int
    tokens: int
    heads: int

    @property
    def row_bytes(self) -> dict[str, int]:
        return {"bf16": 2 * (LATENT + ROPE), "fp8": fp8_row_bytes(LATENT, ROPE)}

    @property
    def name(self) -> str:
        return f"h={self.heads} b={self.batch} s={self.tokens}"


class Rows:
    """Random rows of several layers, their page table and the queries."""

    def __init__(self, case: Case, device: torch.device, *, packed: bool = False) -> None:
        pages = case.batch * case.tokens // PAGE
        layer_bytes = pages * PAGE * case.row_bytes["bf16"]
        self.num_layers = max(1, min(MAX_LAYERS, STEP_BYTES // layer_bytes))
        self.layers = [_random_rows(pages, device) for _ in range(self.num_layers)]
        if packed:
            self.layers = [_packed(layer) for layer in self.layers]
        self.q_BNW = torch.randn(case.batch, case.heads, LATENT + ROPE, device=device).to(torch.bfloat16)
        self.plan = PagedPlan.allocate(
            num_sequences=case.batch, max_pages=case.tokens // PAGE, page_tokens=PAGE, device=device
        )
        tables = torch.randperm(pages).view(case.batch, -1)
        self.plan.update_(list(tables), [case.tokens] * case.batch)

    def step(self, attend: Callable[..., Tensor], plan: object) -> Callable[[], object]:
        def run() -> None:
            self.plan.derived.clear()
            for layer_PSW in self.layers:
                attend(self.q_BNW, layer_PSW, plan, scale=SCALE, latent_width=LATENT)

        return recorded(run)


def _random_rows(pages: int, device: torch.device) -> Tensor:
    rows_PSW = torch.empty(pages, PAGE, LATENT + ROPE, dtype=torch.bfloat16, device=device)
    return rows_PSW.normal_()


def _packed(rows_PSW: Tensor) -> Tensor:
    parts = [quant.quantise(part.flatten(0, 1), latent_width=LATENT) for part in torch.split(rows_PSW, 4096)]
    return torch.cat(parts).view(len(rows_PSW), PAGE, -1)


def own_backend(case: Case, layer_PSW: Tensor) -> Backend[mla_decode.Problem, mla_decode.MlaDecode]:
    """Return the first that is not FlashMLA and takes the case."""
    ours = [backend for backend in mla_decode.BACKENDS if backend.name != "flashmla"]
    return choose("mla_decode", ours, _problem(case, layer_PSW))


def chosen_backend(case: Case, layer_PSW: Tensor) -> Backend[mla_decode.Problem, mla_decode.MlaDecode]:
    return choose("mla_decode", mla_decode.BACKENDS, _problem(case, layer_PSW))


def _problem(case: Case, layer_PSW: Tensor) -> mla_decode.Problem:
    return mla_decode.Problem(
        "cuda", layer_PSW.dtype, case.heads, LATENT, LATENT + ROPE, case.batch, layer_PSW.shape[1]
    )


def against_flashmla(case: Case, device: torch.device, *, copy_bytes_per_s: float, repetitions: int) -> dict[str, Any]:
    """Return ours over the copy rate and over FlashMLA, where that is installed."""
    rows = Rows(case, device)
    ours, chosen = own_backend(case, rows.layers[0]), chosen_backend(case, rows.layers[0])
    works = {"ours": rows.step(ours.load(), mla_decode.DecodePlan.of(rows.plan))}
    if flashmla_refuses("cuda", torch.bfloat16, 64, LATENT, LATENT + ROPE, PAGE) is None:
        works["flashmla"] = rows.step(load_flashmla(), rows.plan)
    times = side_by_side(works, repetitions=repetitions, calls_per_work=rows.num_layers)
    read_bytes = case.batch * case.tokens * case.row_bytes["bf16"]
    result: dict[str, Any] = {
        "case": case.name, "layers": rows.num_layers, "read_bytes": read_bytes,
        "our_backend": ours.name, "chosen_backend": chosen.name,
    }  # fmt: skip
    for name, time in times.items():
        result[name] = time.as_json() | {
            "rate_over_copy": round(read_bytes / time.median_s / copy_bytes_per_s, 4),
            "tflop_per_s": round(2176 * case.heads * case.batch * case.tokens / time.median_s / 1e12, 1),
        }
    if "flashmla" in times:
        result["time_over_flashmla"] = round(times["ours"].median_s / times["flashmla"].median_s, 4)
    return result


def in_words(result: dict[str, Any]) -> str:
    """Return what `against_flashmla` found as one line."""
    line = f"{result['case']}: {result['our_backend']} at {result['ours']['rate_over_copy']:.3f} of the copy rate"
    if "flashmla" in result:
        line += f", {result['time_over_flashmla']:.3f} of FlashMLA's time"
    return f"{line}; {result['chosen_backend']} is chosen"


def packed_against_whole(case: Case, device: torch.device, *, repetitions: int) -> dict[str, Any]:
    """Return the speed of 8-bit rows over bf16 rows, and the error that `quant` states, as measured here."""
    sets = {name: Rows(case, device, packed=packed) for name, packed in (("bf16", False), ("fp8", True))}
    works = {
        name: rows.step(chosen_backend(case, rows.layers[0]).load(), mla_decode.DecodePlan.of(rows.plan))
        for name, rows in sets.items()
    }
    times = side_by_side(works, repetitions=repetitions, calls_per_work=sets["bf16"].num_layers)
    return {
        "case": case.name,
        **{name: time.as_json() for name, time in times.items()},
        "speed_over_bf16": round(times["bf16"].median_s / times["fp8"].median_s, 4),
    }
