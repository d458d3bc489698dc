"""The options by which commands say who they are; `identity` makes credentials of them."""

from __future__ import annotations

import argparse


def add_identity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls-ca", default="", metavar="F", help="PEM file of the fleet's CA; without, plain text")
    parser.add_argument("--tls-cert", default="", metavar="F", help="PEM file of your certificate")
    parser.add_argument("--tls-key", default="", metavar="F", help="PEM file of its key")
    parser.add_argument("--token-file", default="", metavar="F", help="file that holds your bearer token")
