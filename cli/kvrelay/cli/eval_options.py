"""Options of `kvrelay eval`."""

from __future__ import annotations

import argparse

from kvrelay.cli.identity_options import add_identity
from kvrelay.cli.option_types import endpoint, positive, positive_seconds, positives, shares

TIMEOUT_S = 600.0


def add_eval(evaluate: argparse.ArgumentParser) -> None:
    """Add the commands `bpb` and `recall`."""
    kinds = evaluate.add_subparsers(dest="eval", required=True, metavar="EVAL")
    _add_bpb(kinds.add_parser("bpb", help="bits per byte of a text, beside what xz makes of it"))
    _add_recall(kinds.add_parser("recall", help="facts hidden in long texts: accuracy by length and depth"))


def _add_bpb(bpb: argparse.ArgumentParser) -> None:
    _add_target(bpb)
    bpb.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text to score")
    bpb.add_argument("--window-tokens", type=positive, default=4096, metavar="N", help="tokens of one forward pass")
    bpb.add_argument(
        "--context-tokens", type=int, metavar="N", help="unscored tokens before each; default: half a window"
    )
    bpb.set_defaults(run="kvrelay.cli.eval_bpb:run")


def _add_recall(recall: argparse.ArgumentParser) -> None:
    _add_target(recall)
    recall.add_argument(
        "--lengths", type=positives, default="512,1024,2048,4096", metavar="N,...", help="prompt tokens"
    )
    recall.add_argument("--depths", type=shares, default="0,0.25,0.5,0.75,1", metavar="D,...", help="0 = text's start")
    recall.add_argument(
        "--samples", type=positive, default=2, metavar="N", help="prompts per cell; every 2nd is a chat"
    )
    recall.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same prompts")
    recall.add_argument("--filler", metavar="FILE", help="text that hides the facts; without it Python's manual")
    recall.add_argument("--repeat", type=positive, default=1, metavar="N", help="ask all again; tokens must be equal")
    recall.add_argument("--compare", metavar="FILE", help="earlier result (--out); exit 1 when any tokens differ")
    recall.add_argument("--png", metavar="FILE", help="write a heat map; needs kvrelay[eval]")
    recall.set_defaults(run="kvrelay.cli.eval_recall:run")


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--endpoint", type=endpoint, metavar="HOST:PORT", help="a router; without it the model runs in this process"
    )
    command.add_argument("--model", metavar="DIR", help="checkpoint (with --endpoint its tokenizer); default: embedded")
    command.add_argument(
        "--latent-format", default="model", choices=["model", "fp8"], help="without --endpoint: numbers of latent rows"
    )
    add_identity(command)
    command.add_argument("--concurrency", type=positive, default=4, metavar="N", help="requests at once to --endpoint")
    command.add_argument(
        "--timeout-s", type=positive_seconds, default=TIMEOUT_S, metavar="S", help="time limit of one request"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object with every figure")
    command.add_argument("--out", metavar="FILE", help="write that object to a file")
