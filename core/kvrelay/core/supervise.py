"""No task, callback or thread that a process lives by ends silently: a bug in one ends the process, and says why."""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

OnBug = Callable[[str], object]  # told the reason; ends the process

_OURS = "kvrelay."
_KEPT = "kept"
log = logging.getLogger(__name__)


def keep(work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
    """Run `work` as a task that the process cannot do without.

    It may return and may be cancelled; an exception that escapes it goes to the loop's exception handler at once,
    whoever else holds the task. See `watch_loop`.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_report)
    return task


def watch_loop(loop: asyncio.AbstractEventLoop, on_bug: OnBug) -> None:
    """Log what escapes to the loop, and call `on_bug` (on the loop) when it is a kept task or a callback of our code.

    Callbacks of libraries are only logged: gRPC's raises now and then and goes on.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        err = context.get("exception")
        if err is not None and (_KEPT in context or ("handle" in context and _is_ours(err.__traceback__))):
            on_bug(_describe(context.get("message", "event loop"), err))

    loop.set_exception_handler(handle)


def watch_threads(on_bug: OnBug) -> None:
    """Log what escapes any thread of this process, and call `on_bug` on that thread when it runs our code."""

    def handle(args: threading.ExceptHookArgs) -> None:
        err, name = args.exc_value, "a thread" if args.thread is None else f"the {args.thread.name} thread"
        if err is None or isinstance(err, SystemExit):
            return
        log.error("%s ends", name, exc_info=err)
        if _is_ours(args.exc_traceback):
            on_bug(_describe(f"{name} was ended by a bug", err))

    threading.excepthook = handle


def _report(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (err := task.exception()) is not None:
        message = f"the task {task.get_name()} was ended by a bug"
        task.get_loop().call_exception_handler({"message": message, "exception": err, "task": task, _KEPT: True})


def _is_ours(where: TracebackType | None) -> bool:
    return any(frame.f_globals.get("__name__", "").startswith(_OURS) for frame, _ in traceback.walk_tb(where))


def _describe(what: str, err: BaseException) -> str:
    while isinstance(err, BaseExceptionGroup) and len(err.exceptions) == 1:
        err = err.exceptions[0]
    return f"{what}: {type(err).__name__}: {err}"
