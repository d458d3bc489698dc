"""Questions of the event loop to the step thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from kvrelay.prefill_node.control import RingControl

T = TypeVar("T")
OnStep = Callable[[Callable[[RingControl], None]], None]  # runs something on the step thread, between two steps


class Reply(Generic[T]):
    """What the event loop awaits, as `future`, and another thread gives. Make it on the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def give(self, value: T) -> None:
        """Answer, from any thread, also when nobody waits any more."""
        self._loop.call_soon_threadsafe(self._set_once, value)

    def _set_once(self, value: T) -> None:
        if not self.future.done():  # the asker may have been cancelled
            self.future.set_result(value)


async def answer_of(on_step: OnStep, question: Callable[[RingControl], T]) -> T:
    """Return what the step thread answers. The question is asked also when nobody waits for the answer any more."""
    reply = Reply[T]()
    on_step(lambda control: reply.give(question(control)))
    return await reply.future
