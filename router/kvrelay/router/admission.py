"""Who is let in: requests that cannot keep their targets are refused at the door, early and with a reason. Pure.

A class of service bounds the wait for the work of others and the time between tokens. What a prompt takes by itself
is the client's choice and counts against its deadline only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Slo(Enum):
    """Class of service of a request."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Targets:
    """What a class is promised."""

    wait_s: float  # longest wait for the work of others, before the own prompt is computed
    between_tokens_s: float  # longest usual time between tokens


TARGETS: Mapping[Slo, Targets] = MappingProxyType(
    {Slo.INTERACTIVE: Targets(2.0, 0.05), Slo.STANDARD: Targets(30.0, 0.5), Slo.BATCH: Targets(300.0, 10.0)}
)


ROOM_FOR_OTHERS = 0.7  # of the promised wait may be ahead at the door; shorter requests that come later overtake

ROOM_TO_GROW = 0.95  # of the promised gap may be filled: answers get longer than expected, and all would be late


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request asks for, besides its work."""

    slo: Slo
    left_s: float  # until the client's deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What the best placement promises a request."""

    wait_s: float
    compute_s: float
    step_s: float  # between its tokens
    is_proven: bool  # the times come from what was seen of the node, not only from what it published


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not let in, and when it may be worth to ask again."""

    reason: str
    retry_after_s: float


def judge(
    prospect: Prospect,
    terms: Terms,
    *,
    waiting: int,
    max_waiting: int,
    targets: Mapping[Slo, Targets] = TARGETS,
) -> Refusal | None:
    """Return why a request is refused, or None.

    Args:
        waiting: requests whose prompt is not computed yet.
    """
    slo, left_s = terms.slo, terms.left_s
    promised = targets[slo]
    if waiting >= max_waiting:
        return Refusal(f"{waiting} requests wait, at most {max_waiting} may", max(1.0, prospect.wait_s / 2))
    if not prospect.is_proven:
        return None  # a node that nobody has seen work may be faster than it says
    longest_s = ROOM_FOR_OTHERS * promised.wait_s
    if prospect.wait_s > longest_s:
        reason = (
            f"{prospect.wait_s:.3g} s of work are ahead, {slo.value} requests are let in behind at most {longest_s:g} s"
        )
        return Refusal(reason, prospect.wait_s - longest_s)
    needs_s = prospect.wait_s + prospect.compute_s
    if prospect.compute_s <= left_s < needs_s:  # what is too long by itself is no matter of load
        return Refusal(
            f"the first token would take {needs_s:.3g} s, the deadline leaves {left_s:.3g} s", needs_s - left_s
        )
    if prospect.step_s > ROOM_TO_GROW * promised.between_tokens_s:
        reason = (
            f"a token would take {prospect.step_s * 1e3:.3g} ms, {slo.value} requests are promised "
            f"{promised.between_tokens_s * 1e3:g} ms"
        )
        return Refusal(reason, 1.0)
    return None
