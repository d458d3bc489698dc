"""Request traces: lengths, times and block ids, as gzip or plain JSON lines.

The block ids of a row are those of its prompt's blocks in order; an id stands for that block and all before it, so it
serves as the block's hash.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvrelay.core.errors import InvalidRequestError

_BLOCK_SIZES = (512, 64)  # of the public traces; a trace's own is the one that fits its rows
_SESSION_START_SPREAD_S = 3600.0  # sessions of a trace without start times begin within this
_COPY_SPREAD_S = 60.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    block_tokens: int
    arrivals: tuple[Arrival, ...]

    def ceiling(self) -> float:
        """Return the share of block references that a cache without limit would hit."""
        references = sum(len(one.blocks) for one in self.arrivals)
        distinct = len({block for one in self.arrivals for block in one.blocks})
        return 1 - distinct / references if references else 0.0


def read(file: Path, *, seed: int = 0) -> Trace:
    """Return a trace; sessions that have no start times get seeded ones.

    Raises:
        InvalidRequestError: the file is missing or not a trace.
    """
    try:
        rows = list(_rows(file))
        block_tokens = _block_tokens(rows)
        starts_s: dict[Any, float] = {}
        rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
        for row in rows:
            if "session" in row:
                starts_s.setdefault(row["session"], rng.uniform(0, _SESSION_START_SPREAD_S))
        arrivals = [
            Arrival(
                row["timestamp"] / 1e3 + starts_s.get(row.get("session"), 0.0),
                row["input_length"],
                row["output_length"],
                tuple(number.to_bytes(16, "big") for number in row.get("hash_ids", ())),
            )
            for row in rows
        ]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise InvalidRequestError(f"{file}: not a request trace: {err}") from err
    arrivals.sort(key=lambda one: one.at_s)
    return Trace(file.name.split(".")[0], block_tokens, tuple(arrivals))


def copied(trace: Trace, copies: int, *, seed: int) -> Trace:
    """Return so many copies of a trace at once. Each has blocks of its own and begins within `_COPY_SPREAD_S`."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    arrivals: list[Arrival] = []
    for number in range(copies):
        begins_s = rng.uniform(0, _COPY_SPREAD_S) if number else 0.0
        names: dict[bytes, bytes] = {}  # one object per block of this copy
        mark = number.to_bytes(4, "big")
        arrivals += (
            replace(
                one,
                at_s=one.at_s + begins_s,
                blocks=tuple(names.setdefault(block, mark + block) for block in one.blocks),
            )
            for one in trace.arrivals
        )
    arrivals.sort(key=lambda one: one.at_s)
    return replace(trace, arrivals=tuple(arrivals))


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def _block_tokens(rows: list[dict[str, Any]]) -> int:
    for size in _BLOCK_SIZES:
        if all(
            row["input_length"] // size <= len(row["hash_ids"]) <= -(-row["input_length"] // size)
            for row in rows
            if "hash_ids" in row
        ):
            return size
    raise ValueError(f"the rows fit none of the block sizes {_BLOCK_SIZES}")
