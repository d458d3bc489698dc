"""Types of command-line options: text in, value out, or a message that names the text."""

from __future__ import annotations

import argparse
import math

from kvrelay.core.address import is_address
from kvrelay.core.clock import MAX_TIME_LIMIT_S

# Names that gRPC resolves in its own ways: several routers at once, or a socket's path.
_NAME_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    """Parse "2" or "1,3"."""
    return tuple(positive(part.strip()) for part in text.split(","))


def shares(text: str) -> tuple[float, ...]:
    """Parse "0.5" or "0,0.25,1": numbers from 0 to 1."""
    found = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError as err:
            raise argparse.ArgumentTypeError(f"{part!r} is not a number") from err
        if not 0 <= value <= 1:
            raise argparse.ArgumentTypeError(f"{part!r} is not in [0, 1]")
        found.append(value)
    return tuple(found)


def start_id(text: str) -> int:
    """Return the start id of a node's life, written as logs and `kvrelay nodes --json` do."""
    try:
        value = int(text, 16)
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not the hexadecimal id of a node's life")
    return value


def endpoint(text: str) -> str:
    """Parse what to connect to: host:port, or a name with one of gRPC's schemes."""
    if not text.startswith(_NAME_SCHEMES) and not is_address(text, least_port=1):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT with a port from 1 to 65535")
    return text


def seconds(text: str) -> float:
    """Parse a time that may be 0."""
    value = _number(text)
    if not 0 <= value <= MAX_TIME_LIMIT_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time from 0 to {MAX_TIME_LIMIT_S} s")
    return value


def positive_seconds(text: str) -> float:
    """Parse a time in which something is to happen."""
    value = _number(text)
    if not 0 < value <= MAX_TIME_LIMIT_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time above 0 and up to {MAX_TIME_LIMIT_S} s")
    return value


def _number(text: str) -> float:
    """Return a number, or one that no limit lets pass."""
    try:
        return float(text)
    except ValueError:
        return math.nan
