"""The copy threads of one rank: they move pages between the pool and host memory while the step thread goes on.

There is one for each direction: what is to be loaded must not wait for what leaves, nor the other way round.
"""

from __future__ import annotations

import queue
import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.types import Counters
from kvrelay.kvcache.host_store import HostStore, Launched
from kvrelay.prefill_node.host_price import HOST_S_PER_GIB
from kvrelay.proto.v1 import ring_pb2

_REMEMBERED = 5  # copies that the speed is the median of; few, so that what was slow for a while is tried again


@dataclass(frozen=True, slots=True)
class _Copy:
    copy_id: int
    pool_pages: Sequence[int]
    host_pages: Sequence[int]
    to_host: bool
    after: Launched


class HostCopier:
    """`begin` and `take_done` are for the step thread; a failure ends the process, as of any thread."""

    def __init__(
        self, store: HostStore, *, counters: Counters, wake: Callable[[], object], clock: Clock = monotonic
    ) -> None:
        """
        Args:
            counters: of the copy threads alone.
            wake: called on a copy thread after each copy.
        """
        self._store = store
        self._counters = counters
        self._wake = wake
        self._clock = clock
        # Of either direction: were it of loads alone, one that was held up would keep others from being tried.
        self._s_per_byte: deque[float] = deque(maxlen=_REMEMBERED)
        self._waiting = {to_host: queue.SimpleQueue[_Copy | None]() for to_host in (True, False)}
        self._done: deque[int] = deque()
        self._threads = [
            threading.Thread(target=self._run, args=(waiting,), name="to host" if to_host else "from host", daemon=True)
            for to_host, waiting in self._waiting.items()
        ]
        for thread in self._threads:
            thread.start()

    def obey(self, copy: ring_pb2.HostCopy, *, rank: int) -> None:
        """Begin a rank's part of a copy, if it has one."""
        for part in copy.parts:
            if part.rank == rank:
                self.begin(copy.copy_id, part.pool_pages, part.host_pages, to_host=copy.to_host)

    def begin(self, copy_id: int, pool_pages: Sequence[int], host_pages: Sequence[int], *, to_host: bool) -> None:
        """Queue a copy behind everything that the calling thread has launched; never waits.

        The pages belong to the copy until `take_done` has named it.
        """
        after = self._store.launched()
        self._waiting[to_host].put(_Copy(copy_id, list(pool_pages), list(host_pages), to_host, after))

    def take_done(self) -> list[int]:
        """Return the copies that have ended since the last call."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        """Wait for the copies that were begun, and end the threads; the store is closed too."""
        for waiting in self._waiting.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._store.close()

    def _run(self, waiting: queue.SimpleQueue[_Copy | None]) -> None:
        self._store.bind_thread()
        while (copy := waiting.get()) is not None:
            began_s = self._clock()
            if copy.to_host:
                self._store.save(copy.pool_pages, copy.host_pages, copy.after)
            else:
                self._store.load(copy.host_pages, copy.pool_pages, copy.after)
            self._note(copy, self._clock() - began_s)
            self._done.append(copy.copy_id)
            self._wake()

    def _note(self, copy: _Copy, took_s: float) -> None:
        num_bytes = len(copy.pool_pages) * self._store.page_bytes
        self._counters.add("host_saved_bytes_total" if copy.to_host else "host_loaded_bytes_total", num_bytes)
        self._s_per_byte.append(took_s / num_bytes)
        self._counters.values[HOST_S_PER_GIB] = statistics.median(self._s_per_byte) * (1 << 30)
