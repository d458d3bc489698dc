"""Request traces: lengths, times and block ids, as gzip or plain JSON lines.

The block ids of a row are those of its prompt's blocks in order; an id stands for that block and all before it, so it
serves as the block's hash.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np

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
    arrivals: Sequence[Arrival]

    def ceiling(self) -> float:
        """Return the share of block references that a cache without limit would hit."""
        if isinstance(self.arrivals, Copies):
            references, distinct = self.arrivals.block_counts()
        else:
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
    except OSError as err:
        raise InvalidRequestError(f"{file}: cannot be read: {err.strerror or err}") from err
    except (ValueError, KeyError, TypeError) as err:
        raise InvalidRequestError(f"{file}: not a request trace: {err}") from err
    arrivals.sort(key=lambda one: one.at_s)
    return Trace(file.name.split(".")[0], block_tokens, tuple(arrivals))


class Copies(Sequence[Arrival]):
    """Many copies of a trace's requests in the order of time, each with blocks of its own, made when they are asked
    for: a million requests and all their blocks would not fit into memory."""

    def __init__(self, base: Sequence[Arrival], starts_s: Sequence[float], *, most: int) -> None:
        """`starts_s`: when each copy begins, after the time of the trace; `most`: requests, the first of all."""
        self.base = base
        times_s = np.add.outer(np.array(starts_s), np.array([one.at_s for one in base])).ravel()
        order = np.argsort(times_s, kind="stable")[:most]
        self._times_s: list[float] = times_s[order].tolist()
        self._copies: list[int] = (order // len(base)).tolist()
        self.numbers: list[int] = (order % len(base)).tolist()  # of the request in the trace, of each

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, at: int) -> Arrival: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Arrival, ...]: ...
    def __getitem__(self, at: int | slice) -> Arrival | tuple[Arrival, ...]:
        if isinstance(at, slice):
            return tuple(self[one] for one in range(*at.indices(len(self))))
        one, mark = self.base[self.numbers[at]], self._copies[at].to_bytes(4, "big")
        return Arrival(
            self._times_s[at], one.prompt_tokens, one.output_tokens, tuple(mark + block for block in one.blocks)
        )

    def block_counts(self) -> tuple[int, int]:
        """Return (references to blocks, distinct blocks). Of each copy there are the first so many requests."""
        references, distinct, seen = [0], [0], set[bytes]()
        for one in self.base:
            seen.update(one.blocks)
            references.append(references[-1] + len(one.blocks))
            distinct.append(len(seen))
        lengths = Counter(self._copies).values()
        return sum(references[length] for length in lengths), sum(distinct[length] for length in lengths)


def copied(trace: Trace, copies: int, *, seed: int, repeats: int = 1, most: int = 1 << 62) -> Trace:
    """Return so many copies of a trace, each with blocks of its own, and of these the first requests.

    Args:
        copies: at once: they begin within `_COPY_SPREAD_S`.
        repeats: of all this, one after another.
    """
    if copies == repeats == 1:
        return replace(trace, arrivals=trace.arrivals[:most])
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    lasts_s = trace.arrivals[-1].at_s - trace.arrivals[0].at_s
    turn_s = lasts_s * len(trace.arrivals) / max(1, len(trace.arrivals) - 1)
    spread_s = [rng.uniform(0, _COPY_SPREAD_S) if number else 0.0 for number in range(copies)]
    starts_s = [turn * turn_s + begins_s for turn in range(repeats) for begins_s in spread_s]
    return replace(trace, arrivals=Copies(trace.arrivals, starts_s, most=most))


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
