"""Options of the benches that need no model: a simulated fleet."""

from __future__ import annotations

import argparse
from typing import Any

from kvrelay.cli.option_types import positive, positives


def add_simulations(kinds: Any) -> None:
    """Add the commands to the sub-commands of `bench`."""
    placement = kinds.add_parser("placement", help="cache hits and evenness of placement on traces, simulated")
    placement.add_argument("trace", nargs="+", metavar="TRACE", help="request traces, JSON lines, also gzip")
    placement.add_argument("--nodes", type=positive, default=8, metavar="N", help="prefill nodes")
    placement.add_argument(
        "--node-tokens", type=positive, default=3_000_000, metavar="N", help="tokens of cache per node"
    )
    placement.add_argument(
        "--slowdown", type=float, default=6.0, metavar="X", help="prefill this many times slower than one H200"
    )
    placement.add_argument("--stale-s", type=float, default=1.0, metavar="S", help="delay of the late index")
    placement.add_argument(
        "--lost-events", type=float, default=0.05, metavar="P", help="share of changes that the late index never sees"
    )
    _add_common(placement, "placement")
    goodput = kinds.add_parser("goodput", help="requests in time under overload, split and not split, simulated")
    goodput.add_argument("trace", metavar="TRACE", help="request trace, JSON lines, also gzip")
    goodput.add_argument("--devices", type=positive, default=4, metavar="N", help="devices, however they are used")
    goodput.add_argument("--requests", type=positive, default=12_031, metavar="N", help="requests of the trace to use")
    _add_common(goodput, "goodput")

    echo = kinds.add_parser("echo", help="time to place a prompt over a bare gRPC echo of the same bytes")
    echo.add_argument(
        "--prompt-tokens", type=positives, default="1024,32768,1048576", metavar="N,...", help="lengths of the prompts"
    )
    echo.add_argument("--prefill", type=positive, default=8, metavar="N", help="prefill nodes to choose from")
    echo.add_argument("--decode", type=positive, default=4, metavar="M", help="decode nodes to choose from")
    echo.add_argument("--rounds", type=positive, default=5, metavar="N", help="pairs of runs at each rate")
    echo.add_argument("--seconds", type=float, default=2.0, metavar="S", help="length of a run")
    _add_common(echo, "echo")


def _add_common(kind: argparse.ArgumentParser, name: str) -> None:
    kind.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same figures")
    kind.add_argument("--out", metavar="DIR", help="folder for the result file; without it nothing is written")
    kind.set_defaults(run=f"kvrelay.bench.{name}:run")
