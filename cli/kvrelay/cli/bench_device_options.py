"""Options of the benches of one or several devices."""

from __future__ import annotations

import argparse
from typing import Any

from kvrelay.cli.option_types import positive, seconds, shares


def add_device_benches(kinds: Any) -> None:
    """Add the commands to the sub-commands of `bench`."""
    step = kinds.add_parser("step", help="time between tokens and to the first token over what the device can do")
    step.add_argument("--context", type=positive, nargs="+", default=[8192, 32_768, 131_072], metavar="N",
                      help="tokens before those generated")  # fmt: skip
    step.add_argument("--batch", type=positive, nargs="+", default=[1, 32], metavar="N", help="sequences of a step")
    step.add_argument("--prompt", type=positive, nargs="+", default=[8192, 32_768, 131_072], metavar="N",
                      help="lengths of prompts to prefill")  # fmt: skip
    step.add_argument("--chunk-tokens", type=positive, default=32_768, metavar="N", help="tokens per prefill chunk")
    step.add_argument("--steps", type=positive, default=40, metavar="N", help="steps per figure")
    step.add_argument("--runs", type=positive, default=3, metavar="N", help="prefills per figure")
    step.add_argument("--same-experts", action="store_true", help="also with all tokens going to the same experts")
    step.add_argument("--weights", choices=["random", "dummy"], default="random",
                      help="dummy: as the engine had that is compared with")  # fmt: skip
    step.add_argument("--transformers", action="store_true",
                      help="also transformers' own model of this shape, at the first prompt length")  # fmt: skip
    step.add_argument("--profile", metavar="FILE", help="write a table of the device's kernels")
    step.add_argument("--device", default="auto", metavar="D", help="auto, cpu or cuda:N")
    _add_common(step, "step")
    memory = kinds.add_parser("memory", help="peak of device memory in a long prefill, predicted and measured")
    memory.add_argument("--prompt-tokens", type=positive, default=1_000_000, metavar="N", help="length of the prompt")
    memory.add_argument("--chunk-tokens", type=positive, default=32_768, metavar="N", help="tokens per prefill chunk")
    memory.add_argument("--paused-chunks", type=int, choices=range(3), default=0, metavar="N",
                        help="others that keep what they have computed; a node pauses two at most")  # fmt: skip
    _add_common(memory, "memory")
    kernels = kinds.add_parser("kernels", help="kernels of a GPU over what it can do and over the kernels of others")
    kernels.add_argument("--repetitions", type=positive, default=15, metavar="N", help="timed runs per figure")
    kernels.add_argument("--full", action="store_true", help="print every repetition")
    kernels.add_argument("--only", choices=["decode", "prefill", "moves"], nargs="+", metavar="K",
                         default=["decode", "prefill", "moves"], help="these kinds alone")  # fmt: skip
    _add_out(kernels, "kernels")
    relay = kinds.add_parser("relay", help="writes of latents between two processes over a plain copy")
    relay.add_argument("--writer", default="cuda:0", metavar="D", help="device of the process that writes")
    relay.add_argument("--reader", default="cuda:0", metavar="D", help="device of the process that is written to")
    relay.add_argument("--megabytes", type=positive, default=512, metavar="N", help="size of each write")
    _add_out(relay, "relay")
    chunks = kinds.add_parser("chunks", help="time to the first token by what a prefill node does beside computing")
    chunks.add_argument("--prompt", type=positive, nargs="+", default=[8192, 32_768, 131_072], metavar="N",
                        help="lengths of the prompt")  # fmt: skip
    chunks.add_argument("--chunk-tokens", type=positive, default=32_768, metavar="N", help="tokens per prefill chunk")
    chunks.add_argument("--rounds", type=positive, default=5, metavar="N", help="prompts per figure")
    chunks.add_argument("--device", default="auto", metavar="D", help="auto, cpu or cuda:N")
    _add_common(chunks, "chunks")
    _add_giving_way(kinds.add_parser("giving-way", help="what a short prompt waits for while a long one is computed"))
    _add_split(kinds.add_parser("split", help="one prefill and one decode node against two that do both"))
    ring = kinds.add_parser("ring", help="one layer's attention over a ring of devices, over what one device takes")
    ring.add_argument("--ranks", type=positive, default=2, metavar="R", help="processes, one device each")
    ring.add_argument("--tokens", type=positive, nargs="+", default=[32_768, 131_072, 524_288], metavar="N",
                      help="lengths of the prompt")  # fmt: skip
    ring.add_argument("--heads", type=positive, nargs="+", metavar="N", help="attention heads; default: the shape's")
    ring.add_argument("--ways", nargs="+", choices=("latent", "expanded", "heads"),
                      default=["latent", "expanded", "heads"], help="what travels")  # fmt: skip
    ring.add_argument("--exchange", action="store_true", help="also what of the communication does not hide")
    ring.add_argument("--png", metavar="FILE", help="with --exchange: a picture of the last length's layers in time")
    ring.add_argument("--rounds", type=positive, default=5, metavar="N", help="measurements per figure")
    ring.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="kind of the devices")
    _add_common(ring, "ring")


def _add_giving_way(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--prompt", type=positive, default=131_072, metavar="N", help="tokens of the long prompt")
    kind.add_argument("--short", type=positive, default=8192, metavar="N", help="tokens of the short one")
    kind.add_argument("--at", type=shares, default="0.2,0.5,0.8", metavar="X,X,...",
                      help="parts of the long one's time after which the short one comes")  # fmt: skip
    kind.add_argument("--chunk-tokens", type=positive, nargs="+", default=[32_768, 131_072], metavar="N",
                      help="tokens per prefill chunk")  # fmt: skip
    kind.add_argument("--give-way-ms", type=positive, default=20, metavar="MS", help="as the setting of a node")
    kind.add_argument("--rounds", type=positive, default=1, metavar="N", help="measurements per figure")
    kind.add_argument("--device", default="auto", metavar="D", help="auto, cpu or cuda:N")
    _add_common(kind, "giving_way")


def _add_split(split: argparse.ArgumentParser) -> None:
    split.add_argument("--prompt", type=positive, nargs="*", default=[8192, 32_768, 131_072], metavar="N",
                       help="lengths at which the hand-off is measured")  # fmt: skip
    split.add_argument("--pairs", type=positive, nargs="*", default=[15, 8, 4], metavar="N",
                       help="pairs of requests for each length")  # fmt: skip
    split.add_argument("--batch", type=positive, nargs="*", default=[8, 1], metavar="N",
                       help="requests that run while long prompts are computed")  # fmt: skip
    split.add_argument("--context", type=positive, default=8192, metavar="N", help="prompt tokens of each of these")
    split.add_argument("--running-tokens", type=positive, default=10240, metavar="N", help="most tokens of each answer")
    split.add_argument("--long-prompt", type=positive, default=131_072, metavar="N", help="tokens of a long prompt")
    split.add_argument("--prompts", type=positive, default=2, metavar="N", help="long prompts of a round")
    split.add_argument("--alone-s", type=seconds, default=2.0, metavar="S", help="time of a round before they come")
    split.add_argument("--rounds", type=positive, default=2, metavar="N", help="rounds per figure")
    split.add_argument("--ways", nargs="+", choices=("split", "chunked", "unchunked"),
                       default=["split", "chunked", "unchunked"], help="who is measured")  # fmt: skip
    split.add_argument("--chunk-tokens", type=positive, default=32_768, metavar="N", help="tokens per prefill step")
    split.add_argument("--mixed-chunk-tokens", type=positive, default=2048, metavar="N",
                       help="prompt tokens between two decode steps of a chunked mixed node")  # fmt: skip
    split.add_argument("--pool-mib", type=positive, default=16_384, metavar="N", help="pool of each process")
    split.add_argument("--device", default="cuda", metavar="D",
                       help="cuda: two GPUs; cuda:N: all on one, for the hand-off alone; cpu")  # fmt: skip
    split.add_argument(
        "--folder", metavar="DIR", help="where the random checkpoint is, or is to be; default: temporary"
    )
    _add_common(split, "split")


def _add_common(kind: argparse.ArgumentParser, name: str) -> None:
    kind.add_argument("--shape", choices=("v2-lite", "tiny"), default="v2-lite", help="widths of the random model")
    _add_out(kind, name)


def _add_out(kind: argparse.ArgumentParser, name: str) -> None:
    kind.add_argument("--out", metavar="DIR", help="folder for the result file; without it nothing is written")
    kind.set_defaults(run=f"kvrelay.bench.{name}:run")
