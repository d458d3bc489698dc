"""Names and values that several parts share. Frozen; each field says who fills it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Tier(Enum):
    """How near a node has a block. What is in DEVICE can be used at once and also counts as in HOST."""

    DEVICE = "device"  # in the pool
    HOST = "host"  # in the pool or in host memory behind it, from where it is loaded first


LOAD_START_S = 0.002  # of a load from host memory, whatever its size: told with one step, reported with another


class Incarnation(NamedTuple):
    """One life of one node: a restart keeps the name and gets a new start_id. Filled at process start.

    A tuple, since a large fleet's nodes are looked up by the thousand: those of a dataclass are hashed in Python.
    """

    name: str
    start_id: int  # 63 random bits

    @classmethod
    def new(cls, name: str) -> Incarnation:
        return cls(name, secrets.randbits(63))

    def __str__(self) -> str:
        return f"{self.name}@{self.start_id:016x}"


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """One reservation: filled by the decode node in Reserve, never reused."""

    decode: Incarnation
    counter: int

    def __str__(self) -> str:
        return f"{self.decode}#{self.counter}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens; validated by the router, obeyed by prefill (first token) and decode (the rest)."""

    max_tokens: int
    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # minted by the router when the client gives none
    stop_token_ids: tuple[int, ...] = ()  # includes the model's eos unless ignore_eos
    logprobs: int | None = None  # None = none; n = chosen token and the n most likely
    prompt_logprobs: bool = False  # of every prompt token but the first


class FinishReason(Enum):
    STOP = "stop"  # a stop token id or stop string
    LENGTH = "length"  # max_tokens reached


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability after temperature-free softmax of the raw logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Natural-log probabilities, under the raw logits, of the prompt tokens from `first_position` on."""

    first_position: int  # at least 1: nothing comes before the first token
    logprobs: tuple[float, ...]

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.first_position + len(self.logprobs)

    def since(self, position: int) -> PromptLogprobs:
        """Return those at `position` and behind it; there may be none."""
        first = max(position, self.first_position)
        return PromptLogprobs(first, self.logprobs[first - self.first_position :])


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int  # prefill did not compute these
    resident_tokens: int  # decode had these; they were not relayed
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive pages of one pool."""

    first_page: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class LinkState:
    """What is known of the way to one peer of the data plane."""

    bytes_per_s: float  # 0 = not known yet
    route: str  # transports and devices, as rc_mlx5/mlx5_0:1; empty = not known yet
    is_expected: bool  # the route is one that the operator expects
    age_s: float = 0.0  # since it was last used


@dataclass(slots=True)
class Counters:
    """Monotonic counts by name, owned by one thread and read by any (a dict read is atomic)."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, amount: float = 1.0) -> None:
        self.values[name] = self.values.get(name, 0.0) + amount


def counted_together(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the counts of several owners: the sum of what has one name, or of a name in `_max` the largest.

    Other threads may go on counting meanwhile.
    """
    together: dict[str, float] = {}
    for part in parts:
        for name, value in dict(part).items():  # in one go: a name that is new would end a loop over the part itself
            others = together.get(name, 0.0)
            together[name] = max(others, value) if name.endswith("_max") else others + value
    return together
