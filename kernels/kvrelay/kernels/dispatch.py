"""Which implementation of a kernel runs: a list per kernel, best first, and a reason for every refusal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvrelay.core.errors import NoKernelError

ProblemT = TypeVar("ProblemT")
KernelT = TypeVar("KernelT")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backend(Generic[ProblemT, KernelT]):
    name: str
    refuses: Callable[[ProblemT], str | None]  # None, or the reason it cannot run
    load: Callable[[], KernelT]  # the optional library is imported in here


def choose(
    kernel: str, backends: Sequence[Backend[ProblemT, KernelT]], problem: ProblemT, wanted: str = "auto"
) -> Backend[ProblemT, KernelT]:
    """Return the first backend that takes the problem; logs the choice and why better ones were passed over.

    Called once per kernel and problem, not per launch.

    Raises:
        NoKernelError: none does; lists each backend's reason.
    """
    refusals: dict[str, str] = {}
    for backend in backends:
        if wanted in ("auto", backend.name):
            why = backend.refuses(problem)
            if why is None:
                passed = "".join(f"; not {name}: {reason}" for name, reason in refusals.items())
                log.info("kernel %s runs on %s for %s%s", kernel, backend.name, problem, passed)
                return backend
            refusals[backend.name] = why
    raise NoKernelError(refusals or {wanted: "no such backend"})
