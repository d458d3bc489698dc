"""Requirements of kvrelay.prefill_node.pages under its control: who waits for room, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core.errors import CapacityError, InvalidRequestError
from kvrelay.core.shard import Span
from kvrelay.prefill_node.control import RingControl
from kvrelay.prefill_node.jobs import Opened, Phase
from kvrelay.prefill_node.pages import RequestPages, RingPages
from played_ring import BLOCK, CHUNK, PAGE, Ring, a_job


def test_a_request_without_room_waits_and_small_ones_pass_it_a_bounded_number_of_times() -> None:
    ring = Ring(pages=8, max_jobs=100)
    ring.control.submit(a_job("holds", 100, prefix=1), 0.0)
    ring.step()
    ring.control.submit(a_job("large", 100, prefix=2), 0.0)
    for number in range(30):
        ring.control.submit(a_job(f"small{number}", 10, prefix=3 + number), 0.0)
    opened: list[str] = []
    for _ in range(100):  # "holds" never ends; small ones do
        events = ring.step()
        opened += [event.key for event in events if isinstance(event, Opened)]
        for key in opened:
            if key.startswith("small") and ring.control.phase_of(key) is Phase.SEALING:
                ring.control.close(key, abort=True)
    assert 0 < len(opened) <= 17
    assert "large#1" not in opened

    ring.control.close("holds#1", abort=True)
    ring.step()
    ring.step()

    assert ring.control.phase_of("large#1") is Phase.RUNNING


class CountingPages(RingPages):
    """Counts how often somebody looks for room or for cached blocks."""

    num_asked = 0

    def take(self, hashes: Sequence[bytes], prompt_tokens: int) -> tuple[RequestPages | None, list[bytes]]:
        self.num_asked += 1
        return super().take(hashes, prompt_tokens)

    def cached_blocks(self, hashes: Sequence[bytes]) -> int:
        self.num_asked += 1
        return super().cached_blocks(hashes)


def test_a_request_without_room_is_looked_at_again_only_when_room_may_have_come() -> None:
    pages = CountingPages(pages_per_rank=[8], page_tokens=PAGE, block_tokens=BLOCK, chunk_tokens=CHUNK, align_tokens=1)
    ring = Ring()
    ring.control = RingControl(pages, block_tokens=BLOCK, chunk_tokens=CHUNK, max_jobs=8, prefix_wait_s=10.0)
    ring.control.submit(a_job("holds", 100, prefix=1), 0.0)
    for _ in range(3):
        ring.step()
    ring.control.submit(a_job("large", 100, prefix=2), 0.0)
    ring.step()
    asked = pages.num_asked
    for _ in range(50):
        ring.step()
    assert (pages.num_asked, ring.control.wants_step) == (asked, False)

    ring.control.close("holds#1", abort=True)
    wanted = [ring.control.wants_step]  # the close must be told
    ring.step()
    wanted += [ring.control.wants_step]  # its pages are back
    ring.step()

    assert wanted == [True, True]
    assert ring.control.phase_of("large#1") is Phase.RUNNING


def test_a_rank_that_is_short_of_pages_costs_no_cached_block_of_another_rank() -> None:
    pages = RingPages(pages_per_rank=[4, 40], page_tokens=PAGE, block_tokens=PAGE, chunk_tokens=CHUNK, align_tokens=1)
    cached: dict[bytes, int] = {}
    for number in range(4):  # one page each, by turns on either rank
        job = a_job(str(number), PAGE, prefix=number + 1)
        held, _ = pages.take((), PAGE * (1 + number % 2))
        assert held is not None
        name = job.key.encode()
        pages.commit([name], held, Span(0, 1))
        cached[name] = held.pages[0][0]
        pages.held.release(held.pages)
    assert pages.account().cached == 4

    taken, evicted = pages.take((), 8 * PAGE)

    assert taken is not None
    assert evicted
    assert all(cached[name] == 0 for name in evicted)
    pages.check()


def test_nothing_is_evicted_for_a_request_that_does_not_fit_anyway() -> None:
    pages = RingPages(pages_per_rank=[4, 40], page_tokens=PAGE, block_tokens=PAGE, chunk_tokens=CHUNK, align_tokens=1)
    holds, _ = pages.take((), 6 * PAGE)
    other, _ = pages.take((), PAGE)
    assert holds is not None
    assert other is not None
    pages.commit([b"other"], other, Span(0, 1))
    pages.held.release(other.pages)
    assert pages.account().cached == 1

    assert pages.take((), 8 * PAGE) == (None, [])


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 300), st.integers(0, 2)),
        st.tuples(st.just("close"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("step"), st.sampled_from([0, 0, 0, 1]), st.integers(0, 1)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS, ring_size=st.integers(1, 3), pages=st.integers(8, 40))
def test_pages_add_up_after_any_sequence_and_all_come_back(
    actions: list[tuple[str, int, int]], ring_size: int, pages: int
) -> None:
    ring = Ring(ring_size=ring_size, pages=pages, max_jobs=12)
    names: list[str] = []
    for kind, first, second in actions:
        if kind == "submit":
            job = a_job(f"r{len(names)}", first, prefix=second)
            try:
                ring.control.submit(job, ring.now_s)
                names.append(job.key)
            except (CapacityError, InvalidRequestError):
                continue
        elif kind == "close" and names:
            ring.control.close(names[first % len(names)], abort=True)
        else:
            ring.step(stopped=bool(first), drain=bool(second))
        ring.pages.check()
        account = ring.pages.account()
        assert account.total == account.free + account.cached + account.pinned + account.quarantined

    ring.run(steps=500)

    assert ring.control.active_jobs == ring.control.closing_jobs == 0
    assert ring.pages.account().pinned == 0
    account = ring.pages.account()
    assert account.free + account.cached == account.total
