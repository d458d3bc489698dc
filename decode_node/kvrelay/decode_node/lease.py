"""The lease thread: makes time pass for sessions and requests, whatever the traffic and however long a step takes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from kvrelay.core.health import Beats


class LeaseThread:
    """Calls `tick` on the event loop every `period_s` seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tick: Callable[[], None], *, period_s: float = 0.2) -> None:
        self._loop = loop
        self._tick = tick
        self._period_s = period_s
        self._ended = threading.Event()
        self._pending = threading.Event()  # a tick that the loop has not come to yet; no second one is queued
        self._beats = Beats(period_s=period_s)
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def stuck_s(self) -> float:
        """Return for how long the thread is late. Any thread."""
        return self._beats.stuck_s()

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            self._beats.beat()
            if self._pending.is_set():
                continue
            self._pending.set()
            try:
                self._loop.call_soon_threadsafe(self._on_loop)
            except RuntimeError:  # the loop is closed: the process is ending
                return

    def _on_loop(self) -> None:
        self._pending.clear()
        self._tick()
