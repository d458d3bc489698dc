"""Options of `kvrelay scale-advice`."""

from __future__ import annotations

import argparse

from kvrelay.cli.defaults import ENDPOINT
from kvrelay.cli.identity_options import add_identity
from kvrelay.cli.option_types import endpoint, positive, positive_seconds, seconds


def add_scale_advice(advice: argparse.ArgumentParser) -> None:
    advice.add_argument("--endpoint", type=endpoint, default=ENDPOINT, metavar="HOST:PORT", help="the router")
    advice.add_argument("--watch-s", type=seconds, default=0.0, metavar="S", help="end after this time; 0 = never")
    advice.add_argument("--interval-s", type=positive_seconds, default=2.0, metavar="S", help="time between two looks")
    advice.add_argument(
        "--prefill-tokens", type=positive, default=32768, metavar="N", help="prompt tokens at a prefill node at once"
    )
    advice.add_argument(
        "--decode-sequences", type=positive, default=64, metavar="N", help="sequences at a decode node at once"
    )
    advice.add_argument("--devices", type=int, default=0, metavar="N", help="devices of both pools; 0 = no limit")
    advice.add_argument(
        "--down-s", type=seconds, default=300.0, metavar="S", help="fewer nodes only after this long without need"
    )
    add_identity(advice)
    advice.set_defaults(run="kvrelay.cli.scale_advice:run")
