"""What `bench handoff` and `bench stream` share: a split cluster and the same engine in this process, taken in turn."""

from __future__ import annotations

import random
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import torch

from kvrelay.bench import local_cluster
from kvrelay.bench.timed import Timed
from kvrelay.core.errors import ServeError
from kvrelay.core.types import Sampling
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.model.embedded_path import embedded_checkpoint
from kvrelay.model.single import SingleEngine
from kvrelay.proto.v1 import common_pb2, inference_pb2, inference_pb2_grpc

WARM_UP_PAIRS = 2
CHUNK_TOKENS = 1024
PAGE_TOKENS = 64
REQUEST_TIMEOUT_S = 300.0


class Split:
    """The cluster, seen by its client."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)

    def generate(self, prompt: list[int], num_tokens: int) -> Timed:
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenPrompt(packed_ids=struct.pack(f"<{len(prompt)}I", *prompt)),
            sampling=common_pb2.Sampling(max_tokens=num_tokens, ignore_eos=True),
        )
        ids: list[int] = []
        at_s: list[float] = []
        began_s = time.perf_counter()
        for event in self._stub.Generate(request, timeout=REQUEST_TIMEOUT_S):
            now_s = time.perf_counter() - began_s
            ids += event.tokens.token_ids
            at_s += [now_s] * len(event.tokens.token_ids)
        return Timed(tuple(ids), tuple(at_s))


class OneProcess:
    """The same engine in this process, with no cluster around it."""

    def __init__(self, model: Path, *, max_tokens: int) -> None:
        device = torch.device("cpu")
        loaded = load_model(model, dtype="float32", device=device, max_model_len=None)
        pages = 2 * -(-max_tokens // PAGE_TOKENS)
        self._engine = SingleEngine(loaded, LatentPool(loaded.layout(block_tokens=PAGE_TOKENS), pages, device))
        self.vocab_size = loaded.config.vocab_size

    def generate(self, prompt: list[int], num_tokens: int) -> Timed:
        ids: list[int] = []
        at_s: list[float] = []
        began_s = time.perf_counter()
        for one in self._engine.generate(prompt, Sampling(max_tokens=num_tokens), chunk_tokens=CHUNK_TOKENS):
            ids.append(one.token_id)
            at_s.append(time.perf_counter() - began_s)
        return Timed(tuple(ids), tuple(at_s))


@contextmanager
def both_sides(model: str | None, *, max_tokens: int) -> Iterator[tuple[Split, OneProcess]]:
    """Run a split cluster (one prefill node of one rank, one decode node) and an engine here; one thread each."""
    folder = Path(model or embedded_checkpoint())
    torch.set_num_threads(1)
    options = ["--model", str(folder), "--ring-size", "1", "--decode", "1", "--dtype", "float32"]
    options += ["--chunk-tokens", str(CHUNK_TOKENS)]
    one_thread = {"KVRELAY_PREFILL_THREADS": "1", "KVRELAY_DECODE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with (
        local_cluster.running(options, environ=one_thread) as cluster,
        grpc.insecure_channel(cluster.endpoint) as channel,
    ):
        yield Split(channel), OneProcess(folder, max_tokens=max_tokens)


def measure(model: str | None, *, prompt_tokens: int, num_tokens: int, num_pairs: int) -> Iterator[tuple[Timed, Timed]]:
    """Yield (split, one process) per pair: a new prompt each time, so that no cache helps; who is first alternates.

    Raises:
        ServeError: the two sides answered differently.
    """
    rng = random.Random(0)  # noqa: S311 - prompts, not secrets
    with both_sides(model, max_tokens=prompt_tokens + num_tokens) as (split, alone):
        for number in range(-WARM_UP_PAIRS, num_pairs):
            prompt = [rng.randrange(alone.vocab_size) for _ in range(prompt_tokens)]
            order = (split, alone) if number % 2 == 0 else (alone, split)
            taken = {id(side): side.generate(prompt, num_tokens) for side in order}
            pair = taken[id(split)], taken[id(alone)]
            if pair[0].token_ids != pair[1].token_ids:
                raise ServeError(
                    f"pair {number}: the cluster answered {pair[0].token_ids}, one process {pair[1].token_ids}"
                )
            print(f"\rpair {max(0, number + 1)} of {num_pairs}", end="", file=sys.stderr, flush=True)
            if number >= 0:
                yield pair
    print(file=sys.stderr)
