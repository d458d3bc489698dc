"""The only thread that touches the transport: posts, polls, takes notices and verifies what landed.

Everybody else hands it commands through a queue. Callbacks run on this thread, in batches; they must be quick and must
not raise (the endpoints pass them on with call_soon_threadsafe).
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.errors import TransferError
from kvrelay.core.types import Counters, LinkState
from kvrelay.kv_transfer.landing import Expected, Landings
from kvrelay.kv_transfer.links import Links
from kvrelay.kv_transfer.notice import NoticeKey
from kvrelay.kv_transfer.outgoing import OnTransferEvents, Outgoing, Posting
from kvrelay.kv_transfer.packing import Packer
from kvrelay.kv_transfer.transport import Address, Transport
from kvrelay.kv_transfer.writers import Writers

log = logging.getLogger(__name__)

# Polling each millisecond is as fast as polling without pause (2.9-3.4 GB/s over tcp) and leaves the core alone. While
# our own writes are in flight it is three times as often: a notification goes out only when its poster polls.
_POLL_READER_S = 0.001
_POLL_WRITER_S = 0.0003
# Nor may a reader be lazy while a request waits for the last parts of its prompt alone.
_POLL_HURRIED_S = 0.0002
_HURRY_S = 0.05  # then the parts are late, and a millisecond more matters little
_POLL_CLOSED_S = 0.05  # for writes that nobody waits for any more: of a peer that neither takes nor fails them
_VERIFY_BUDGET_S = 0.005
# A longer gap between two polls (the thread was posting or verifying) counts as progress for no longer than this.
_LONGEST_COUNTED_GAP_S = 0.01
_START_TIMEOUT_S = 60.0

MakeTransport = Callable[[Counters], Transport]
_Command = Callable[[Transport], None]


@dataclass(slots=True)
class _Drain:
    remaining_s: float
    asked_s: float
    done: Callable[[], None]


class TransferThread:
    """Start it once per process. Any thread may call any method; all but start and stop return at once.

    A writer's key is any text that is unique in this process; events of one key come in order.
    """

    def __init__(
        self,
        make_transport: MakeTransport,
        *,
        on_fatal: Callable[[], None],
        packer: Packer | None = None,
        max_idle_peers: int = 256,
        expected_routes: tuple[str, ...] = (),
        clock: Clock = monotonic,
    ) -> None:
        """Prepare the thread.

        Args:
            make_transport: called on the thread; the transport counts into what it is given.
            max_idle_peers: connections kept for the next hand-off to the same peer; peers that restart get new names.
            expected_routes: transports that links should use, see `is_expected`; another one is warned of.
            on_fatal: called on the thread when it dies of a bug; the process should end with a new incarnation.
            packer: of scattered parts, if they are to be packed; used on the thread.
        """
        self.counters = Counters()
        self.caught_up_s = clock()  # all that had landed by then was reported; read by any thread
        self._make_transport = make_transport
        self._on_fatal = on_fatal
        self._packer = packer
        self._clock = clock
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._links = Links(self.counters, expected_routes=expected_routes, clock=clock)
        self._writers = Writers(self._links, self.counters, max_idle_peers=max_idle_peers, clock=clock)
        self._landings = Landings(self.counters, clock)
        self._drains: list[_Drain] = []
        self._last_poll_s = clock()
        self._hurry_until_s = -math.inf
        self._round_since_s: float | None = None  # begin of the round in work; None while the thread waits
        self._started: Future[Address] = Future()
        self._thread = threading.Thread(target=self._main, name="transfer", daemon=True)

    def start(self) -> Address:
        """Start the thread and return the address of its agent.

        Raises:
            ServeError: the transport cannot start, or not in time.
        """
        self._thread.start()
        # Waiting does not raise what the transport raises, so a TimeoutError of its own is not taken for ours.
        if not wait((self._started,), _START_TIMEOUT_S).done:
            raise TransferError(f"the transport did not start within {_START_TIMEOUT_S:g} s")
        return self._started.result()

    def stop(self) -> None:
        """Stop talking to all peers. Registered memory stays registered until the process exits."""
        self._commands.put(None)
        self._thread.join()

    def stuck_s(self) -> float:
        """Return for how long one round of commands, posts, polls and checks has taken so far. Any thread."""
        since_s = self._round_since_s
        return 0.0 if since_s is None else self._clock() - since_s

    @property
    def is_idle(self) -> bool:
        """No write of ours is in flight, and no peer's write is expected or waited for. Any thread."""
        return not (
            self._writers or self._drains or self._landings.open_epochs or self._round_since_s or self._commands.qsize()
        )

    @property
    def address(self) -> Address:
        return self._started.result(0)

    def links(self) -> dict[str, LinkState]:
        """Return what is known of the link to each peer that was written to, by the name of its agent. Any thread."""
        return self._links.states()

    # ---- as a writer ----

    def open_writer(
        self, key: str, address: Address, *, fence_cell: int, fence_value: int, on_events: OnTransferEvents
    ) -> None:
        """Connect to a peer and take parts for it; a fence would write `fence_value` into its `fence_cell`."""

        def open_on_thread(transport: Transport) -> None:
            meter = self._links.to(address.agent_name)
            outgoing = Outgoing(
                address.agent_name, fence_cell, fence_value, on_events,
                meter=meter, packer=self._packer, clock=self._clock,
            )  # fmt: skip
            self._writers.open(transport, key, address, outgoing)

        self._put(open_on_thread)

    def post_part(self, key: str, posting: Posting) -> None:
        self._put(lambda _: self._writers[key].add(posting))

    def finish(self, key: str) -> None:
        """No part will follow: report Drained when every handle has ended."""
        self._put(lambda _: self._writers[key].finish())

    def fence(self, key: str) -> None:
        """Drop what is not posted and prove that nothing more lands: FenceDone or FenceFailed, and Drained."""
        self._put(lambda _: self._writers[key].stop_and_fence())

    def close_writer(self, key: str) -> None:
        """Forget a writer once all its handles have ended; until then they are watched, for Drained."""
        self._put(lambda _: self._writers.close(key))

    # ---- as a reader ----

    def expect(self, key: NoticeKey, expected: Expected) -> None:
        """Poll, so that peers can connect and write, and report the parts of this epoch as they land."""
        self._put(lambda _: self._landings.expect(key, expected))

    def forget(self, key: NoticeKey) -> None:
        """Count further notices of this epoch as stale; with no epoch left, stop polling."""
        self._put(lambda _: self._landings.forget(key))

    def hurry(self) -> None:
        """Poll more often for a moment: what is still to land is waited for."""

        def hurry_on_thread(_: Transport) -> None:
            self._hurry_until_s = self._clock() + _HURRY_S

        self._put(hurry_on_thread)

    def drain(self, seconds: float, done: Callable[[], None]) -> None:
        """Call `done` after this thread has polled for `seconds`: what a dead peer left in our sockets has landed."""
        self._put(lambda _: self._drains.append(_Drain(seconds, self._clock(), done)))

    # ---- on the thread ----

    def _put(self, command: _Command) -> None:
        self._commands.put(command)

    def _main(self) -> None:
        try:
            transport = self._make_transport(self.counters)
            self._started.set_result(transport.address())
        except Exception as err:  # the outermost edge of a thread; whoever waits in `start` raises it
            self._started.set_exception(err)
            return
        try:
            self._run(transport)
        except Exception:  # the outermost edge of a thread: nothing may end silently
            log.exception("the transfer thread died")
            self._on_fatal()

    def _run(self, transport: Transport) -> None:
        pause_s: float | None = None
        while True:
            for command in self._take_commands(pause_s):
                if command is None:
                    transport.close()
                    return
                if self._round_since_s is None:
                    self._round_since_s = self._clock()
                command(transport)
            self._round_since_s = self._clock()
            pause_s = self._step(transport)
            self._round_since_s = None

    def _take_commands(self, pause_s: float | None) -> Iterator[_Command | None]:
        """Yield what is queued; with nothing queued wait for `pause_s`, or for ever when it is None."""
        try:
            yield self._commands.get(block=pause_s != 0, timeout=pause_s)
            while True:
                yield self._commands.get_nowait()
        except queue.Empty:
            return

    def _step(self, transport: Transport) -> float | None:
        """Do one round and return how long to wait before the next one; None = until there is a command."""
        moved = self._writers.step(transport)
        lost = self._writers.give_up_lost(transport)
        reads = self._landings.open_epochs > 0 or bool(self._drains) or self._landings.has_backlog
        if reads or lost:
            asked_s = self._clock()
            incoming = transport.notices()
            self._landings.take(incoming)
            moved |= bool(incoming)
            self._landings.work(budget_s=_VERIFY_BUDGET_S)
            self._count_progress()
            if not self._landings.has_backlog:
                self.caught_up_s = asked_s
        if moved or self._landings.has_backlog:
            return 0
        if self._writers.is_busy:
            return _POLL_WRITER_S
        if reads:
            return _POLL_HURRIED_S if self._clock() < self._hurry_until_s else _POLL_READER_S
        return _POLL_CLOSED_S if lost or self._writers.has_leftovers else None

    def _count_progress(self) -> None:
        now_s, last_s = self._clock(), self._last_poll_s
        self._last_poll_s = now_s
        if self._landings.has_backlog:
            return
        for drain in list(self._drains):
            drain.remaining_s -= min(now_s - max(last_s, drain.asked_s), _LONGEST_COUNTED_GAP_S)
            if drain.remaining_s <= 0:
                self._drains.remove(drain)
                drain.done()
