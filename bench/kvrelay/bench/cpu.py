"""`kvrelay bench cpu`: prefill and decode on CPU cores, beside plain transformers with the same checkpoint.

Both run in this process, in turn, in fp32, with the same threads. Transformers runs as it comes: its default attention
and experts, the whole prompt in one forward pass, logits of the last token only, then one forward pass per token over
its own cache, without the overhead of its `generate`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from kvrelay.bench import report
from kvrelay.core.errors import SettingsError
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.model.embedded_path import embedded_checkpoint
from kvrelay.model.single import SingleEngine

CHUNK_TOKENS = 1024  # of a prefill node on CPUs
WARM_UP_TOKENS = 512
BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Timed:
    """One prompt and the greedy tokens after it."""

    prefill_s: float
    step_s: float  # median time of a decode step
    prefill_cpu_s: float  # of all threads; other processes on the machine change it little
    step_cpu_s: float  # mean of a decode step
    token_ids: tuple[int, ...]


class Watch:
    """Measures one run: call `lap` after the prefill and after each step."""

    def __init__(self) -> None:
        self._walls_s = [time.perf_counter()]
        self._cpus_s = [time.process_time()]

    def lap(self) -> None:
        self._walls_s.append(time.perf_counter())
        self._cpus_s.append(time.process_time())

    def timed(self, token_ids: Sequence[int]) -> Timed:
        """Return the figures of a run of at least one step."""
        walls_s = [later - earlier for earlier, later in pairwise(self._walls_s)]
        cpus_s = [later - earlier for earlier, later in pairwise(self._cpus_s)]
        return Timed(
            walls_s[0], statistics.median(walls_s[1:]), cpus_s[0], statistics.mean(cpus_s[1:]), tuple(token_ids)
        )


class Side(Protocol):
    def run(self, prompt: list[int], num_tokens: int) -> Timed: ...


class Ours:
    """The one-process engine."""

    def __init__(self, folder: Path, *, max_tokens: int) -> None:
        device = torch.device("cpu")
        model = load_model(folder, dtype="float32", device=device, max_model_len=None)
        layout = model.layout(block_tokens=BLOCK_TOKENS)
        self._engine = SingleEngine(model, LatentPool(layout, layout.pages_for(max_tokens), device))
        self.config = model.config

    def run(self, prompt: list[int], num_tokens: int) -> Timed:
        session = self._engine.open(len(prompt) + num_tokens)
        try:
            watch = Watch()
            ids = [int(self._engine.prefill(session, prompt, chunk_tokens=CHUNK_TOKENS).argmax())]
            watch.lap()
            while len(ids) < num_tokens:
                ids.append(int(self._engine.decode_step([session], ids[-1:]).argmax()))
                watch.lap()
            return watch.timed(ids)
        finally:
            self._engine.close(session)


class Transformers:
    """Hugging Face's own implementation, as it comes."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            SettingsError: the library is not installed; it is no dependency of kvrelay.
        """
        if find_spec("transformers") is None:
            raise SettingsError(
                "this bench compares with transformers, which is not installed: pip install transformers"
            )
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - not a dependency

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self._model.config
        self.settings = {
            "attention": getattr(config, "_attn_implementation", None),
            "experts": getattr(config, "_experts_implementation", None),
        }

    @torch.inference_mode()
    def run(self, prompt: list[int], num_tokens: int) -> Timed:
        watch = Watch()
        out = self._model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        ids = [int(out.logits[0, -1].argmax())]
        watch.lap()
        while len(ids) < num_tokens:
            out = self._model(torch.tensor([ids[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            ids.append(int(out.logits[0, -1].argmax()))
            watch.lap()
        return watch.timed(ids)


def run(options: argparse.Namespace) -> int:
    """Measure, print the figures and write the result file when asked to."""
    if options.output_tokens < 2:
        raise SettingsError("--output-tokens 1 has no decode step to time")
    folder = Path(options.model or embedded_checkpoint())
    torch.set_num_threads(options.threads)
    theirs = Transformers(folder)
    ours = Ours(folder, max_tokens=options.prompt_tokens + options.output_tokens)
    load_average = psutil.getloadavg()[0]  # of the last minute: others that compute here distort the wall times
    pairs = measure(ours, theirs, options, vocab_size=ours.config.vocab_size)
    result: dict[str, Any] = {
        "model": folder.resolve().name,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "rounds": options.rounds,
        "dtype": "float32",
        "threads": options.threads,
        "load_average_before": round(load_average, 2),
        "transformers": {"version": version("transformers"), **theirs.settings},
        "prefill": report.paired([a.prefill_s for a, _ in pairs], [b.prefill_s for _, b in pairs]),
        "prefill_cpu": report.paired([a.prefill_cpu_s for a, _ in pairs], [b.prefill_cpu_s for _, b in pairs]),
        "decode_step": report.paired([a.step_s for a, _ in pairs], [b.step_s for _, b in pairs]),
        "decode_step_cpu": report.paired([a.step_cpu_s for a, _ in pairs], [b.step_cpu_s for _, b in pairs]),
        "rounds_with_equal_tokens": sum(a.token_ids == b.token_ids for a, b in pairs),
    }
    result["prefill_speedup"] = round(1 / result["prefill"]["ratio_median"], 3)
    result["decode_speedup"] = round(1 / result["decode_step"]["ratio_median"], 3)
    print(json.dumps(result, indent=2))
    if options.out:
        print(report.write(Path(options.out), device="cpu", bench="cpu", result=result))
    return 0


def measure(ours: Side, theirs: Side, options: argparse.Namespace, *, vocab_size: int) -> Sequence[tuple[Timed, Timed]]:
    """Return (ours, theirs) per round: a new prompt each time; who is first alternates."""
    rng = random.Random(0)  # noqa: S311 - prompts, not secrets
    pairs = []
    for side in (ours, theirs):
        side.run([rng.randrange(vocab_size) for _ in range(WARM_UP_TOKENS)], 3)
    for number in range(options.rounds):
        prompt = [rng.randrange(vocab_size) for _ in range(options.prompt_tokens)]
        order = (ours, theirs) if number % 2 == 0 else (theirs, ours)
        taken = {id(side): side.run(prompt, options.output_tokens) for side in order}
        pairs.append((taken[id(ours)], taken[id(theirs)]))
        print(f"\rround {number + 1} of {options.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return pairs
