"""`kvrelay bench ring`: attention of one layer over a ring of devices, over what one device takes for all of it.

Efficiency is T1 / (R x TR). Three ways share the same kernels: the ring of latents that serves, a ring that rotates
expanded keys and values, and heads split over the ranks behind an all-gather of latents. Both sides are cut into the
same blocks, because a very long call of an attention kernel is slower than several shorter ones.

Shapes in this file: T own tokens, S all tokens, N heads, K key width, V value width, W latent row, R ranks.
"""

from __future__ import annotations

import argparse
import json
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

from kvrelay.bench import report, ring_rivals
from kvrelay.bench.device_rates import short_name, synchronize, timed_s
from kvrelay.bench.random_model import SHAPES, random_model
from kvrelay.core.errors import RingError, SettingsError
from kvrelay.core.shard import Span
from kvrelay.core.types import Counters
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.transformer import Model
from kvrelay.prefill_node import ring_plan
from kvrelay.prefill_node.group import Header, RingGroup, form, serve_store
from kvrelay.prefill_node.ring import Lap, Ring
from kvrelay.prefill_node.settings import RankPlace

_TIMEOUT_S = 120.0
LAYERS = 8  # in a row per measurement, as in a model: ranks meet once behind them all
_TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}  # of one way's result against another's, in its dtype


def run(options: argparse.Namespace) -> int:
    """Measure, print the figures and write the result file when asked to."""
    on_gpus = options.device == "cuda"
    if on_gpus and torch.cuda.device_count() < options.ranks:
        raise SettingsError(f"a ring of {options.ranks} needs as many GPUs, {torch.cuda.device_count()} are here")
    result = {"shape": options.shape, "ranks": options.ranks, "device": options.device, "lengths": measure(options)}
    print(json.dumps(result, indent=1))
    if options.out:
        name = short_name(torch.device(options.device))
        print(report.write(Path(options.out), device=name, bench="ring", result=result))
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
    config = replace(SHAPES[options.shape], num_layers=1)
    model = random_model(config, device, dtype)
    figures = [_one_length(model, group, tokens, options.rounds) for tokens in options.tokens]
    if rank == 0:
        results.put(figures)


def _one_length(model: Model, group: RingGroup, tokens: int, rounds: int) -> dict[str, Any]:
    layer, config, device = model.layers[0], model.config, model.device
    pool = LatentPool(model.layout(block_tokens=64), 1, device)
    generator = torch.Generator(device).manual_seed(7)  # equal on all ranks

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=model.dtype, device=device, generator=generator)

    all_rows_SW = randn(tokens, config.kv_lora_rank + config.rope_width)
    spans = ring_plan.rank_spans(Span(0, tokens), ring_size=group.size, align_tokens=64)
    queries_SNK = randn(tokens, config.num_heads, config.key_width)
    own = torch.from_numpy(ring_plan.positions_of(spans[group.rank])).to(device)
    q_TNK, own_TW = queries_SNK[own], all_rows_SW[own]
    scale = model.softmax_scale
    if group.rank:
        del queries_SNK, all_rows_SW

    lap = Lap(
        [sum(span.num_tokens for span in one) for one in spans],
        [ring_plan.visible_pairs(spans[group.rank], one) for one in spans],
        [None] * group.size,
    )
    ring = Ring(group, pool, Counters())
    header = Header(0, 0, stop=False)
    ways: dict[str, Callable[[], Tensor]] = {
        "latent": lambda: ring.attend(layer, q_TNK, own_TW, [lap], header=header, scale=scale)[0].out_TNV,
        "expanded": lambda: ring_rivals.expanded_ring(layer, group, q_TNK, own_TW, lap, scale=scale),
        "heads": lambda: ring_rivals.split_heads(layer, group, q_TNK, own_TW, spans, scale=scale),
    }
    taken_s = {name: _slowest_s(way, group, device, rounds) for name, way in ways.items()}
    _compare({name: way() for name, way in ways.items()}, device)
    figures: dict[str, Any] = {"tokens": tokens}
    if group.rank == 0:
        alone = Ring(None, pool, Counters())
        one = Span(0, tokens)
        whole = Lap([tokens], [ring_plan.visible_pairs([one], [one])], [None])

        def attend_alone() -> None:
            for _ in range(LAYERS):
                alone.attend(layer, queries_SNK, all_rows_SW, [whole], header=header, scale=scale)

        attend_alone()
        alone_s = statistics.median(timed_s(attend_alone, device) for _ in range(rounds)) / LAYERS
        figures["alone_ms"] = round(alone_s * 1e3, 3)
        for name, seconds in taken_s.items():
            figures[f"{name}_ms"] = round(seconds * 1e3, 3)
            figures[f"{name}_efficiency"] = round(alone_s / (group.size * seconds), 4)
        figures |= _bytes_sent(model, tokens, group.size)
    group.barrier()
    return figures


def _slowest_s(way: Callable[[], Tensor], group: RingGroup, device: torch.device, rounds: int) -> float:
    """Return the median over rounds of the time until the last rank is through."""

    def _until_all() -> None:
        for _ in range(LAYERS):
            way()
        synchronize(device)
        group.barrier()

    way()
    taken_s = []
    for _ in range(rounds):
        group.barrier()
        taken_s.append(timed_s(_until_all, device))
    return statistics.median(taken_s) / LAYERS


def _compare(results: dict[str, Tensor], device: torch.device) -> None:
    """Refuse figures of ways that do not compute the same."""
    expected = results["latent"].float()
    for name, found in results.items():
        error = float((found.float() - expected).norm() / expected.norm())
        if not error < _TOLERANCE[device.type]:
            raise RingError(f"{name} differs from the ring of latents by {error}")


def _bytes_sent(model: Model, tokens: int, size: int) -> dict[str, int]:
    """Return what one rank sends in a layer, by way."""
    config, number_bytes = model.config, model.dtype.itemsize
    own, latent = tokens // size, config.kv_lora_rank + config.rope_width
    expanded = config.num_heads * (config.key_width + config.value_width)
    moved = own * expanded * (size - 1) // size  # queries leave, results come back
    return {
        "latent_bytes": own * (size - 1) * latent * number_bytes,
        "expanded_bytes": own * (size - 1) * expanded * number_bytes,
        "heads_bytes": (own * (size - 1) * latent + moved) * number_bytes,
    }
