"""Questions of the event loop to the step thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvrelay.prefill_node.control import RingControl

T = TypeVar("T")
OnStep = Callable[[Callable[[RingControl], None]], None]  # runs something on the step thread, between two steps


async def answer_of(on_step: OnStep, question: Callable[[RingControl], T]) -> T:
    """Return what the step thread answers. The question is asked also when nobody waits for the answer any more."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def ask(control: RingControl) -> None:
        loop.call_soon_threadsafe(_set_once, answer, question(control))

    on_step(ask)
    return await answer


def _set_once(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():  # the asker may have been cancelled
        answer.set_result(value)
