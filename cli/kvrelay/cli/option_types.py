"""Types of command-line options: text in, value out, or a message that names the text."""

from __future__ import annotations

import argparse


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
