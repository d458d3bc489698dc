"""`kvrelay bench ring`: attention of one layer over a ring of devices, over what one device takes for all of it.

Efficiency is T1 / (R x TR). Three ways share the same kernels: the ring of latents that serves, a ring that rotates
expanded keys and values, and heads split over the ranks behind an all-gather of latents. Both sides are cut into the
same blocks, because a very long call of an attention kernel is slower than several shorter ones. Beside it stands what
of a ring's communication does not hide behind attention (ring_exchange.py).
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch lists it nowhere

from kvrelay.bench import report, ring_exchange, ring_picture
from kvrelay.bench.device_rates import short_name, timed_s
from kvrelay.bench.random_model import SHAPES, random_model
from kvrelay.bench.ring_layer import RingLayer
from kvrelay.core.errors import RingError, SettingsError
from kvrelay.model.transformer import Model
from kvrelay.prefill_node.group import RingGroup, form, serve_store
from kvrelay.prefill_node.settings import RankPlace

_TIMEOUT_S = 120.0
LAYERS = 8  # in a row per measurement, as in a model: ranks meet once behind them all
_LONG_PAIRS = 2.3e12  # heads times tokens squared of one measurement: fewer layers in a row, and rounds, when longer
_LONG_ROUNDS = 2
PROFILED_LAYERS = 2
_TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}  # of one way's result against another's, in its dtype


def run(options: argparse.Namespace) -> int:
    """Measure, print the figures and write the result file when asked to."""
    on_gpus = options.device == "cuda"
    if on_gpus and torch.cuda.device_count() < options.ranks:
        raise SettingsError(f"a ring of {options.ranks} needs as many GPUs, {torch.cuda.device_count()} are here")
    result = {"shape": options.shape, "ranks": options.ranks, "device": options.device, "lengths": measure(options)}
    report.tell(result, out=options.out, device=short_name(torch.device(options.device)), bench="ring")
    if options.png:
        found = result["lengths"][-1]
        title = (
            f"{PROFILED_LAYERS} layers, {found['tokens']:,} tokens, {found['heads']} heads, rank 0 of {options.ranks}"
        )
        ring_picture.draw(found["timeline"], Path(options.png), title=title)
    return 0


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    store = serve_store(ring_size=options.ranks, timeout_s=_TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(rank, options, store.port, results), daemon=True)
        for rank in range(options.ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RingError(f"ranks ended with {[process.exitcode for process in processes]}")
    figures: list[dict[str, Any]] = results.get()
    return figures


@torch.inference_mode()
def _rank(rank: int, options: argparse.Namespace, port: int, results: SimpleQueue[list[dict[str, Any]]]) -> None:
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, options.ranks, is_master=False)
    place = RankPlace(rank, options.ranks, spawns=False, local_rank=rank)
    group = form(place, device, store=store, group_timeout_s=_TIMEOUT_S, start_timeout_s=_TIMEOUT_S)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    figures = []
    for heads in options.heads or [SHAPES[options.shape].num_heads]:
        model = random_model(replace(SHAPES[options.shape], num_layers=1, num_heads=heads), device, dtype)
        figures += [_one_length(model, group, tokens, options) for tokens in options.tokens]
        del model
    if rank == 0:
        results.put(figures)


def _one_length(model: Model, group: RingGroup, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    device, heads = model.device, model.config.num_heads
    inputs = RingLayer(model, group, tokens)
    layers, rounds = _repetitions(heads, tokens, options.rounds)
    figures: dict[str, Any] = {"tokens": tokens, "heads": heads, "layers_in_a_row": layers, "rounds": rounds}

    def in_turns_s(*ways: Callable[[], object]) -> list[list[float]]:
        return ring_exchange.in_turns_s(ways, group, device, layers=layers, rounds=rounds)

    ways = {name: inputs.way(name) for name in options.ways}
    times_s = dict(zip(ways, in_turns_s(*ways.values()), strict=True))
    if len(ways) > 1:
        _compare({name: way() for name, way in ways.items()}, device)
    if options.exchange:
        unconnected = ring_exchange.Unconnected(group)
        figures["exchange"] = {
            name: ring_exchange.exposure(
                *in_turns_s(inputs.way(name), inputs.way(name, unconnected), inputs.exchange_only(name))
            )
            for name in options.ways
            if name != "heads"
        }
        figures["timeline"] = ring_exchange.timeline(inputs.way("latent"), group, device, layers=PROFILED_LAYERS)
    if group.rank == 0:
        alone = inputs.alone()
        alone()
        times_s["alone"] = [
            timed_s(lambda: [alone() for _ in range(layers)], device) / layers for _ in range(rounds)
        ]  # fmt: skip
        figures |= _judged(times_s, group.size) | _bytes_sent(model, tokens, group.size)
        print({name: value for name, value in figures.items() if name != "timeline"}, flush=True)
    group.barrier()
    return figures


def _repetitions(heads: int, tokens: int, rounds: int) -> tuple[int, int]:
    """Return layers in a row per measurement, and measurements, so that long prompts do not take minutes."""
    pairs = float(heads * tokens**2)
    return max(1, min(LAYERS, int(_LONG_PAIRS / pairs))), rounds if pairs <= _LONG_PAIRS else min(rounds, _LONG_ROUNDS)


def _judged(times_s: dict[str, list[float]], size: int) -> dict[str, Any]:
    medians_s = {name: statistics.median(one) for name, one in times_s.items()}
    figures: dict[str, Any] = {"rounds_ms": {name: [round(a * 1e3, 4) for a in one] for name, one in times_s.items()}}
    for name, taken_s in medians_s.items():
        figures[f"{name}_ms"] = round(taken_s * 1e3, 3)
        if name != "alone":
            figures[f"{name}_efficiency"] = round(medians_s["alone"] / (size * taken_s), 4)
    return figures


def _compare(results: dict[str, Tensor], device: torch.device) -> None:
    """Refuse figures of ways that do not compute the same."""
    expected = results["latent"].float()
    for name, found in results.items():
        error = float((found.float() - expected).norm() / expected.norm())
        if not error < _TOLERANCE[device.type]:
            raise RingError(f"{name} differs from the ring of latents by {error}")


def _bytes_sent(model: Model, tokens: int, size: int) -> dict[str, float]:
    """Return what one rank sends in a layer, by way."""
    config, number_bytes = model.config, model.dtype.itemsize
    own, latent = tokens // size, config.kv_lora_rank + config.rope_width
    expanded = config.num_heads * (config.key_width + config.value_width)
    moved = own * expanded * (size - 1) // size  # queries leave, results come back
    return {
        "expanded_over_latent_bytes": round(expanded / latent, 3),
        "latent_bytes": own * (size - 1) * latent * number_bytes,
        "expanded_bytes": own * (size - 1) * expanded * number_bytes,
        "heads_bytes": (own * (size - 1) * latent + moved) * number_bytes,
    }
