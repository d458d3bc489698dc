"""`kvrelay bench split`: one prefill and one decode node against two nodes that do both, on two devices.

Two questions. What does the hand-off add until the second token (TT2), over the time to the first on one node (TTFT)?
And how even do answers stream while long prompts are computed? The cluster is `kvrelay up`, seen by its client, router
and network included; a mixed node (mixed_node.py) is one process with nothing in front of it. The first question is
also answered beside a mixed node that is served to the same client (served_node.py). Weights are random, in the shape
of a known model, written to a folder once and loaded by every process as any checkpoint is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.bench import (
    exposed,
    gaps,
    local_cluster,
    mixed_node,
    order_process,
    random_checkpoint,
    report,
    split_client,
)
from kvrelay.bench.device_rates import short_name
from kvrelay.bench.random_model import SHAPES
from kvrelay.bench.timed import Timed
from kvrelay.core.errors import SettingsError
from kvrelay.core.settings import load
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.model.loaded import choose_device

WARM_UP_PAIRS = 2
READY_TIMEOUT_S = 300.0
CLUSTER, SERVED = 0, 1  # whom the client asks
Ids = npt.NDArray[np.int64]


def run(options: argparse.Namespace) -> int:
    """Measure, print the figures and, when asked to, write the result file after each part."""
    devices = devices_of(options.device)
    if len(set(devices)) == 1 and devices[0] != "cpu" and options.batch:
        raise SettingsError(
            f"what runs beside a prompt on {devices[0]} alone waits for it: --batch {options.batch} wants two devices; "
            "give --batch without a number"
        )
    on_gpus = devices[0] != "cpu"
    name = short_name(torch.device(devices[0]))
    result: dict[str, Any] = {
        "shape": options.shape, "device": options.device, "prefill_chunk_tokens": options.chunk_tokens,
        "mixed_chunk_tokens": options.mixed_chunk_tokens,
    }  # fmt: skip

    def keep(new: dict[str, Any]) -> None:
        print(json.dumps(new), flush=True)
        if options.out:
            report.write(Path(options.out), device=name, bench="split", result=result)

    with ExitStack() as stack:
        folder = Path(options.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-split-")))
        began_s = time.perf_counter()
        if not (folder / "config.json").exists():
            random_checkpoint.write(folder, SHAPES[options.shape], device=torch.device(devices[0]))
            if on_gpus:
                torch.cuda.empty_cache()
        written_s = time.perf_counter()
        bench = stack.enter_context(Bench.started(options, folder, devices))
        result["start_s"] = {"checkpoint": round(written_s - began_s, 1),
                             "processes": round(time.perf_counter() - written_s, 1)}  # fmt: skip
        result["handoff"] = []
        for tokens, pairs in zip(options.prompt, options.pairs, strict=True):
            result["handoff"].append(bench.hand_off(tokens, pairs))
            keep(result["handoff"][-1])
        result["between_tokens"] = []
        for batch in options.batch:
            rounds: list[dict[str, Any]] = []
            part: dict[str, Any] = {"batch": batch, "context": options.context, "rounds": rounds}
            result["between_tokens"].append(part)
            for number, way in product(range(options.rounds), options.ways):
                rounds.append({"way": way, **bench.between(way, batch, number)})
                part["medians"] = _by_way(rounds)
                keep(rounds[-1])
    return 0


def devices_of(device: str) -> list[str]:
    """Return where prefill and decode are.

    Raises:
        SettingsError: no such device, or two GPUs are wanted and not there.
    """
    if device != "cuda":
        return [str(choose_device(device))] * 2
    if torch.cuda.device_count() < 2:
        raise SettingsError(f"two GPUs are wanted, {torch.cuda.device_count()} are here; --device cuda:0 takes one")
    return ["cuda:0", "cuda:1"]


def _by_way(rounds: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    ways = dict.fromkeys(one["way"] for one in rounds)
    return {way: gaps.medians([one for one in rounds if one["way"] == way]) for way in ways}


@contextmanager
def _client(cluster: str, mixed: Sequence[order_process.Remote]) -> Iterator[order_process.Remote]:
    """Wait for the mixed nodes, and start the client of the cluster and of the first of them."""
    for node in mixed:
        node.receive()
    endpoints: dict[int, str] = {CLUSTER: cluster, SERVED: mixed[0].ask(mixed_node.Serve())}
    with order_process.started(split_client.serve, [(endpoints[CLUSTER], endpoints[SERVED])]) as (client,):
        client.receive()
        yield client


class Bench:
    """A split cluster on both devices and a mixed node on each; who does not work waits without computing."""

    def __init__(
        self, options: argparse.Namespace, client: order_process.Remote, mixed: Sequence[order_process.Remote]
    ) -> None:
        """
        Args:
            client: of the cluster, and of the first mixed node, as it is served.
        """
        self._options, self._client, self._mixed = options, client, mixed
        self._vocab_size = SHAPES[options.shape].vocab_size

    @classmethod
    @contextmanager
    def started(cls, options: argparse.Namespace, folder: Path, devices: Sequence[str]) -> Iterator[Bench]:
        """Start everything at once and return when all of it is ready."""
        max_batch = max(options.batch, default=0) + 1
        common = ["--model", str(folder), "--pool-mib", str(options.pool_mib), "--max-batch", str(max_batch)]
        settings = [
            load(DecodeSettings, [*common, "--device", one, "--threads", "1"], prog="kvrelay bench split")
            for one in (devices if options.batch else devices[:1])
        ]
        environ = {
            "KVRELAY_PREFILL_DEVICE": devices[0],
            "KVRELAY_DECODE_DEVICE": devices[1],
            "KVRELAY_PREFILL_POOL_MIB": str(options.pool_mib),
            "KVRELAY_DECODE_POOL_MIB": str(options.pool_mib),
            "KVRELAY_DECODE_MAX_BATCH": str(max_batch),
        }
        up = ["--model", str(folder), "--ring-size", "1", "--decode", "1", "--chunk-tokens", str(options.chunk_tokens)]
        with (
            order_process.started(mixed_node.serve, [(one, options.chunk_tokens) for one in settings]) as mixed,
            local_cluster.running(up, environ=environ, ready_timeout_s=READY_TIMEOUT_S) as cluster,
            _client(cluster.endpoint, mixed) as client,
        ):
            yield cls(options, client, mixed)

    def hand_off(self, tokens: int, pairs: int) -> dict[str, Any]:
        """Return the first and second token of the cluster, of one mixed node in its process, and of that one served.

        They take turns with the same prompt.
        """
        rounds: list[exposed.Round] = []
        for number in range(-min(WARM_UP_PAIRS, (pairs + 1) // 2), pairs):
            prompt = self._prompt(tokens, 0, number + WARM_UP_PAIRS)
            asks: dict[str, Callable[[], Any]] = {
                "cluster": partial(self._client.ask, split_client.Answer(prompt, 2, CLUSTER)),
                "one": partial(self._mixed[0].ask, mixed_node.Answer(prompt, 2)),
                "served": partial(self._served, prompt),
            }
            taken = {way: asks[way]() for way in list(asks)[:: 1 if number % 2 else -1]}
            if number >= 0:
                ours, parts = taken["cluster"]
                rounds.append(exposed.Round(ours, taken["one"], taken["served"], parts))
        return {"prompt_tokens": tokens, **exposed.figures(rounds)}

    def _served(self, prompt: Ids) -> Timed:
        """Return what the client sees of the first mixed node."""
        self._mixed[0].begin(mixed_node.AnswerCaller())
        timed: Timed
        timed, _ = self._client.ask(split_client.Answer(prompt, 2, SERVED))
        self._mixed[0].receive()
        return timed

    def between(self, way: str, batch: int, number: int) -> dict[str, Any]:
        """Return the figures of one round: `batch` requests run while the prompts are computed."""
        options = self._options
        # A prompt that the cluster has seen would come from its cache.
        contexts = [self._prompt(options.context, 1, batch, number, row) for row in range(batch)]
        prompts = [self._prompt(options.long_prompt, 2, batch, number, one) for one in range(options.prompts)]
        if way == "split":
            watched = split_client.Watch(contexts, prompts, options.running_tokens, options.alone_s)
            seen: gaps.Beside = self._client.ask(watched)
            return seen.figures()
        chunk_tokens = options.mixed_chunk_tokens if way == "chunked" else None
        busy = self._mixed[:batch]
        for place, node in enumerate(busy):
            node.begin(
                mixed_node.Mix(
                    contexts[place :: len(busy)], options.running_tokens, prompts[place :: len(busy)], chunk_tokens,
                    options.alone_s,
                )
            )  # fmt: skip
        return gaps.Beside.joined([node.receive() for node in busy]).figures()

    def _prompt(self, tokens: int, *seed: int) -> Ids:
        return np.random.default_rng((tokens, *seed)).integers(self._vocab_size, size=tokens, dtype=np.int64)
