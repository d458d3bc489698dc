"""`kvrelay bench step`: time between tokens and time to the first token of one device, over what it could do at best.

Weights are random and in the shape of a known model; the latents of the context are random rows. Each figure stands
beside the device's own copy and matmul rates, measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvrelay.bench import device_rates, report, step_profile, step_transformers, vllm_figures
from kvrelay.bench.device_rates import Rates
from kvrelay.bench.random_model import SHAPES, random_model
from kvrelay.core.types import Sampling
from kvrelay.decode_node.engine import DecodeEngine, SequenceState
from kvrelay.decode_node.scheduler import Sequence
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.loaded import choose_device
from kvrelay.model.sampler import SamplerState
from kvrelay.model.single import SingleEngine
from kvrelay.model.transformer import Model

WARM_UP_STEPS = 3
RESERVE_BYTES = {"cuda": 14 << 30, "cpu": 1 << 28}  # for what prefill and the recorded steps need beside the pool
SPARE_TOKENS = 128  # behind each context, for the tokens that are generated


class Bench:
    """One model and one pool, which decode and prefill take turns to use."""

    def __init__(self, options: argparse.Namespace, device: torch.device, *, same_experts: bool) -> None:
        self.config = SHAPES[options.shape]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model: Model = random_model(
            self.config, device, dtype, same_experts=same_experts, dummy=options.weights == "dummy"
        )
        self.device, self.same_experts, self.options = device, same_experts, options
        self.number_bytes = dtype.itemsize
        layout = self.model.layout(block_tokens=64)
        wanted = max(
            options.batch[-1] * layout.pages_for(max(options.context) + SPARE_TOKENS),
            layout.pages_for(max(options.prompt)),
        )
        room = _free_bytes(device) - RESERVE_BYTES[device.type]
        self.pool = LatentPool(layout, min(wanted, room // layout.page_bytes_all_layers), device)
        for layer in range(layout.num_layers):
            self.pool.layer(layer).normal_()
        self.decode = DecodeEngine(self.model, self.pool, max_batch=options.batch[-1])
        self.single = SingleEngine(self.model, self.pool)

    def tables(self, batch: int, context: int) -> tuple[list[list[int]], float]:
        """Return scattered pages for each sequence, and the share of pages that two sequences have in common.

        Where the pool is too small, later sequences take the pages of earlier ones, in an order of their own: no page
        is read twice at about the same time, so caches do not help.
        """
        per_sequence = self.pool.layout.pages_for(context + SPARE_TOKENS)
        rng = random.Random(context)  # noqa: S311 - not secrets
        tables = []
        for row in range(batch):
            pages = [page % self.pool.num_pages for page in range(row * per_sequence, (row + 1) * per_sequence)]
            rng.shuffle(pages)
            tables.append(pages)
        return tables, max(0.0, 1 - self.pool.num_pages / (batch * per_sequence))

    def time_between_tokens(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        tables, shared = self.tables(batch, context)
        states = [SequenceState.of(pages, SamplerState(Sampling(max_tokens=SPARE_TOKENS), [0])) for pages in tables]
        ids = random.Random(batch)  # noqa: S311
        rows = [
            Sequence(row, context, ids.randrange(self.config.vocab_size), SPARE_TOKENS, frozenset())
            for row in range(batch)
        ]
        taken_s = []
        for _ in range(WARM_UP_STEPS + steps):
            began_s = time.perf_counter()
            tokens = self.decode.step(rows, states)
            taken_s.append(time.perf_counter() - began_s)
            for row, token in zip(rows, tokens, strict=True):
                row.position += 1
                row.last_token = getattr(token, "token_id", 0)
        taken_s = taken_s[WARM_UP_STEPS:]
        weights = device_rates.step_weight_bytes(
            self.config, batch=batch, number_bytes=self.number_bytes, same_experts=self.same_experts
        )
        cache = device_rates.step_cache_bytes(
            self.config, lengths=[context + steps // 2] * batch, number_bytes=self.number_bytes
        )
        return {
            "batch": batch, "context": context, "same_experts": self.same_experts,
            "step_ms": round(statistics.median(taken_s) * 1e3, 4), "step_p99_ms": round(max(taken_s) * 1e3, 4),
            "weight_bytes": int(weights), "cache_bytes": cache, "shared_pages": round(shared, 3),
        }  # fmt: skip

    def time_to_first_token(self, tokens: int, runs: int) -> dict[str, Any]:
        rng = np.random.default_rng(tokens)
        taken_s = []
        for run in range(runs + 1):
            prompt = rng.integers(self.config.vocab_size, size=tokens)
            session = self.single.open(tokens)
            began_s = time.perf_counter()
            int(self.single.prefill(session, prompt, chunk_tokens=self.options.chunk_tokens).argmax())
            if run:
                taken_s.append(time.perf_counter() - began_s)
            self.single.close(session)
        products, attention = device_rates.prefill_flop(self.config, tokens)
        return {
            "prompt_tokens": tokens, "same_experts": self.same_experts, "chunk_tokens": self.options.chunk_tokens,
            "ttft_ms": round(statistics.median(taken_s) * 1e3, 3), "runs_ms": [round(one * 1e3, 2) for one in taken_s],
            "product_flop": products, "attention_flop": attention,
        }  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure, print the figures and write the result file when asked to."""
    device = choose_device(options.device)
    with torch.inference_mode():
        result = measure(options, device)
    report.tell(result, out=options.out, device=device_rates.short_name(device), bench="step")
    return 0


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    rates = device_rates.measure(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    result: dict[str, Any] = {
        "shape": options.shape, "device": str(device), "copy_tb_per_s": round(rates.copy_bytes_per_s / 1e12, 3),
        "matmul_tflop_per_s": round(rates.matmul_flop_per_s / 1e12, 1),
        "sustained_tflop_per_s": round(rates.sustained_flop_per_s / 1e12, 1), "weights": options.weights,
        "decode": [], "prefill": [],
    }  # fmt: skip
    for same_experts in (False, True) if options.same_experts else (False,):
        bench = Bench(options, device, same_experts=same_experts)
        if options.profile and not same_experts:
            step_profile.write(bench, Path(options.profile), prompt_tokens=min(options.prompt[-1], 32_768))
        for tokens in options.prompt:
            result["prefill"].append(_judge_prefill(bench.time_to_first_token(tokens, options.runs), rates))
            print(result["prefill"][-1], flush=True)
        for context in options.context:
            for batch in options.batch:
                result["decode"].append(_judge_step(bench.time_between_tokens(batch, context, options.steps), rates))
                print(result["decode"][-1], flush=True)
        del bench
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if options.transformers:
        theirs = step_transformers.measure(
            SHAPES[options.shape], device, prompt_tokens=options.prompt[0], steps=options.steps, runs=options.runs
        )
        result["transformers"] = step_transformers.beside(theirs, result)
    return result


def _judge_step(figures: dict[str, Any], rates: Rates) -> dict[str, Any]:
    floor_s = (figures["weight_bytes"] + figures["cache_bytes"]) / rates.copy_bytes_per_s
    figures["floor_ms"] = round(floor_s * 1e3, 4)
    figures["over_floor"] = round(figures["step_ms"] / 1e3 / floor_s, 3)
    return figures | vllm_figures.step_ratio(figures)


def _judge_prefill(figures: dict[str, Any], rates: Rates) -> dict[str, Any]:
    flop = figures.pop("product_flop") + figures.pop("attention_flop")
    floor_s = flop / rates.matmul_flop_per_s
    figures["floor_ms"] = round(floor_s * 1e3, 3)
    figures["over_floor"] = round(figures["ttft_ms"] / 1e3 / floor_s, 3)
    figures["over_sustained_floor"] = round(figures["ttft_ms"] / 1e3 / (flop / rates.sustained_flop_per_s), 3)
    return figures | vllm_figures.ttft_ratio(figures)


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 30
