"""Options of the benches that need no model: a simulated fleet."""

from __future__ import annotations

import argparse
from typing import Any

from kvrelay.cli.identity_options import add_identity
from kvrelay.cli.option_types import endpoint, positive, positive_seconds, positives, seconds


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
    placement.add_argument("--stale-s", type=seconds, default=1.0, metavar="S", help="delay of the late index")
    placement.add_argument(
        "--lost-events", type=float, default=0.05, metavar="P", help="share of changes that the late index never sees"
    )
    placement.add_argument("--png", metavar="FILE", help="also draw a picture (needs kvrelay[eval])")
    _add_common(placement, "placement")
    goodput = kinds.add_parser("goodput", help="requests in time under overload, split and not split, simulated")
    goodput.add_argument("trace", metavar="TRACE", help="request trace, JSON lines, also gzip")
    goodput.add_argument("--devices", type=positive, default=4, metavar="N", help="devices, however they are used")
    goodput.add_argument("--requests", type=positive, default=1_200, metavar="N", help="requests of the trace to use")
    _add_common(goodput, "goodput")

    _add_replay(kinds.add_parser("replay", help="one trace over a simulated fleet with one policy"))
    _add_load(kinds.add_parser("load", help="live requests at a rate, or those of a trace, against a real router"))
    echo = kinds.add_parser("echo", help="time to place a prompt over a bare gRPC echo of the same bytes")
    echo.add_argument(
        "--prompt-tokens", type=positives, default="1024,32768,1048576", metavar="N,...", help="lengths of the prompts"
    )
    echo.add_argument("--prefill", type=positive, default=8, metavar="N", help="prefill nodes to choose from")
    echo.add_argument("--decode", type=positive, default=4, metavar="M", help="decode nodes to choose from")
    echo.add_argument("--rounds", type=positive, default=5, metavar="N", help="pairs of runs at each rate")
    echo.add_argument("--seconds", type=positive_seconds, default=2.0, metavar="S", help="length of a run")
    _add_common(echo, "echo")


def _add_replay(replay: argparse.ArgumentParser) -> None:
    replay.add_argument("--trace", required=True, metavar="FILE", help="request trace, JSON lines, also gzip")
    replay.add_argument("--nodes", type=positive, default=8, metavar="N", help="prefill nodes")
    replay.add_argument("--decode", type=positive, metavar="M", help="decode nodes; default: half as many")
    replay.add_argument("--node-tokens", type=positive, default=3_000_000, metavar="T", help="tokens of cache per node")
    replay.add_argument(
        "--policy",
        default="ours",
        choices=["ours", "random", "round-robin", "least-loaded", "longest-prefix"],
        help="who chooses the nodes",
    )
    replay.add_argument(
        "--requests", type=positive, default=1_000_000, metavar="N", help="requests of the trace to use"
    )
    replay.add_argument(
        "--copies", type=positive, default=1, metavar="K", help="of the trace at once, each with blocks of its own"
    )
    replay.add_argument(
        "--repeat", type=positive, default=1, metavar="R", help="all this so often, one after another, with new blocks"
    )
    replay.add_argument("--slowdown", type=float, default=6.0, metavar="X", help="prefill this many times slower")
    replay.add_argument("--stale-s", type=seconds, default=0.0, metavar="S", help="delay of the index")
    replay.add_argument("--lost-events", type=float, default=0.0, metavar="P", help="share of changes that get lost")
    replay.add_argument("--json", action="store_true", help="changes nothing: the last line is one JSON object anyway")
    _add_common(replay, "replay")


def _add_load(load: argparse.ArgumentParser) -> None:
    load.add_argument(
        "--endpoint", type=endpoint, metavar="HOST:PORT", help="the router; without it a cluster is started for this"
    )
    load.add_argument("--model", metavar="DIR", help="checkpoint folder of that cluster; default: the embedded model")
    load.add_argument("--prefill", type=positive, default=1, metavar="N", help="prefill nodes of that cluster")
    load.add_argument("--decode", type=positive, default=1, metavar="M", help="decode nodes of that cluster")
    load.add_argument("--trace", metavar="FILE", help="request trace; without it all prompts have one length")
    load.add_argument("--rate", type=float, metavar="R", help="requests per second; default: 1, or the trace's own")
    load.add_argument("--requests", type=positive, default=60, metavar="N", help="about so many requests")
    load.add_argument("--prompt-tokens", type=positive, default=512, metavar="N", help="length without a trace")
    load.add_argument("--shared-tokens", type=int, default=0, metavar="N", help="of it, the same in all prompts")
    load.add_argument("--output-tokens", type=positive, default=32, metavar="N", help="answer; of a trace, at most")
    load.add_argument("--slo", default="standard", choices=["interactive", "standard", "batch"], help="service class")
    load.add_argument(
        "--ttft-s", type=positive_seconds, metavar="S", help="first token in time; default: the wait of the class"
    )
    load.add_argument("--tbt-s", type=positive_seconds, metavar="S", help="gap in time; default: that of the class")
    load.add_argument("--timeout-s", type=positive_seconds, default=300.0, metavar="S", help="deadline of a request")
    add_identity(load)
    _add_common(load, "load")


def _add_common(kind: argparse.ArgumentParser, name: str) -> None:
    kind.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same figures")
    kind.add_argument("--out", metavar="DIR", help="folder for the result file; without it nothing is written")
    kind.set_defaults(run=f"kvrelay.bench.{name}:run")
