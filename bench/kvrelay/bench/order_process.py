"""A process of a bench that obeys one order after another, with an interpreter and a device of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from kvrelay.core.errors import ServeError, UnavailableError

Obey = Callable[[Any], Any]
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class _Failed:
    """In place of a result; errors of all kinds do not come through a pipe as they were."""

    reason: str


class Remote:
    """The other side: orders go out, results come back in turn."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ask(self, order: Any) -> Any:
        """Have an order obeyed and return what came of it.

        Raises:
            UnavailableError: it failed, or the process has ended.
        """
        self.begin(order)
        return self.receive()

    def begin(self, order: Any) -> None:
        """Let it begin; `receive` waits for what comes of it."""
        self._connection.send(order)

    def receive(self) -> Any:
        """Return the result of the oldest order; the first one of all is True, once the process is ready.

        Raises:
            UnavailableError: the order failed, or the process has ended.
        """
        try:
            result = self._connection.recv()
        except EOFError:
            raise UnavailableError("a process of the bench has ended; its last words are above") from None
        if isinstance(result, _Failed):
            raise UnavailableError(result.reason)
        return result


@contextmanager
def started(make: Callable[..., Obey], all_arguments: Sequence[tuple[Any, ...]]) -> Iterator[list[Remote]]:
    """Start one process per tuple of arguments, all at once.

    Args:
        make: called there with the arguments; what it returns obeys the orders. A function of a module, which each
            process imports with all that the module needs.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in all_arguments]
    processes = [
        context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        for (_, theirs), arguments in zip(pipes, all_arguments, strict=True)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()  # so that a process that dies ends our wait
    try:
        yield [Remote(ours) for ours, _ in pipes]
    finally:
        for ours, _ in pipes:
            ours.close()
        for process in processes:
            process.join(_STOP_S)
            process.kill()


def _serve(orders: Connection, make: Callable[..., Obey], arguments: tuple[Any, ...]) -> None:
    """The process: obey until nobody asks any more."""
    obey = make(*arguments)
    orders.send(True)
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        try:
            result = obey(order)
        except ServeError as err:
            result = _Failed(str(err))
        orders.send(result)
