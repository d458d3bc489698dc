"""Evicted blocks go to host memory and come back, under the control of a ring whose pages have contents."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core import prefix_hash
from kvrelay.core.shard import Span
from kvrelay.core.time_fit import Fitted
from kvrelay.core.types import Sampling
from kvrelay.prefill_node.control import RingControl
from kvrelay.prefill_node.host_price import load_pays
from kvrelay.prefill_node.jobs import CacheChanged, Computed, Event, Job, Opened, Phase
from kvrelay.prefill_node.pages import RingPages
from kvrelay.proto.v1 import common_pb2, ring_pb2
from kvrelay.router.tenants import Tenant
from played_ring import BLOCK, CHUNK, PAGE, a_job

Page = tuple[int, int]


class RingWithHost:
    """Ranks whose pages hold what was written into them: the name of all tokens up to the page's end."""

    def __init__(self, *, ring_size: int = 1, pages: int = 8, host_pages: int = 64) -> None:
        self.pages = RingPages(
            pages_per_rank=[pages] * ring_size,
            page_tokens=PAGE,
            block_tokens=BLOCK,
            chunk_tokens=CHUNK,
            align_tokens=1,
            host_pages_per_rank=[host_pages] * ring_size,
            page_bytes=1000,
        )
        self.control = RingControl(self.pages, block_tokens=BLOCK, chunk_tokens=CHUNK, max_jobs=50, prefix_wait_s=1e6)
        self.size = ring_size
        self.pool: dict[Page, bytes] = {}
        self.host: dict[Page, bytes] = {}
        self.jobs: dict[str, Job] = {}
        self.copying: list[tuple[int, int, bool, list[tuple[Page, Page, bytes]]]] = []
        self.computed_tokens = 0
        self.here: set[bytes] = set()  # what the events say
        self.in_host: set[bytes] = set()

    def submit(self, job: Job) -> None:
        self.jobs[job.key] = job
        self.control.submit(job, 0.0)

    def content(self, job: Job, page: int) -> bytes:
        return job.prompt_T[: (page + 1) * PAGE].tobytes()

    def step(self, *, ends: Callable[[], bool] = lambda: True) -> list[Event]:
        """Do one step; a copy that a rank has begun ends in it when `ends` says so."""
        step = self.control.plan(1.0)
        for copy in step.copies:
            self._begin(copy)
        self._look_and_compute(step)
        reports = [ring_pb2.RankReport(step_id=step.step_id, rank=rank) for rank in range(self.size)]
        self._end_copies(reports, ends)
        for report in reports:
            report.drained.extend(step.closes)
        events = self.control.applied(reports)
        self.pages.check()
        for event in events:
            if isinstance(event, CacheChanged):
                self.here = (self.here - set(event.removed)) | set(event.added)
                self.in_host = (self.in_host - set(event.host_removed)) | set(event.host_added)
        for key in self.jobs:
            if self.control.phase_of(key) is Phase.SEALING:
                self.control.close(key, abort=False)
        return events

    def _look_and_compute(self, step: ring_pb2.RingStep) -> None:
        for opened in step.opens:
            job = self.jobs[f"{opened.request.request_id}#{opened.request.attempt}"]
            for prompt_page, page in pages_of(opened.cached_pages):
                assert self.pool[page] == self.content(job, prompt_page), "foreign rows"
        if step.HasField("chunk"):
            job = self.jobs[step.chunk.request_id]
            self.computed_tokens += step.chunk.tokens.end - step.chunk.tokens.start
            for prompt_page, page in pages_of(step.chunk.new_pages):
                self.pool[page] = self.content(job, prompt_page)

    def _begin(self, copy: ring_pb2.HostCopy) -> None:
        held = self.pool if copy.to_host else self.host
        for part in copy.parts:
            ways: list[tuple[Page, Page, bytes]] = []
            for pool, host in zip(part.pool_pages, part.host_pages, strict=True):
                source, target = (pool, host) if copy.to_host else (host, pool)
                ways.append(((part.rank, source), (part.rank, target), held[part.rank, source]))
            self.copying.append((copy.copy_id, part.rank, copy.to_host, ways))

    def _end_copies(self, reports: list[ring_pb2.RankReport], ends: Callable[[], bool]) -> None:
        going_on = []
        for copy in self.copying:
            if not ends():
                going_on.append(copy)
                continue
            copy_id, rank, to_host, ways = copy
            source, target = (self.pool, self.host) if to_host else (self.host, self.pool)
            for from_page, to_page, content in ways:
                assert source[from_page] == content, "a page changed while it was copied"
                target[to_page] = content
            reports[rank].copied.append(copy_id)
        self.copying = going_on

    def run(self, *jobs: Job, ends: Callable[[], bool] = lambda: True) -> list[Event]:
        for job in jobs:
            self.submit(job)
        events: list[Event] = []
        for _ in range(300):
            events += self.step(ends=ends)
            if not (self.control.active_jobs or self.control.closing_jobs or self.control.is_copying):
                return events
        raise AssertionError("not done")

    def value(self, name: str) -> float:
        host = self.pages.host
        assert host is not None
        return host.counters.values.get(name, 0.0)


def pages_of(runs: Iterable[ring_pb2.OwnedRun]) -> Iterator[tuple[int, Page]]:
    """Yield (page of the prompt, page of the ring)."""
    for run in runs:
        for number in range(run.num_pages):
            yield run.prompt_page + number, (run.rank, run.first_page + number)


def opened(events: list[Event], key: str) -> int:
    return next(one.cached_tokens for one in events if isinstance(one, Opened) and one.key == key)


def test_what_was_evicted_comes_back_and_is_not_computed_again() -> None:
    ring = RingWithHost()
    first = a_job("a", 120, prefix=1)
    ring.run(first)
    ring.run(a_job("b", 120, prefix=2))  # has no room beside the first
    assert not ring.here >= set(first.block_hashes)
    assert ring.in_host
    ring.computed_tokens = 0

    events = ring.run(a_job("again", 120, prefix=1))

    assert opened(events, "again#1") == 96  # whole blocks before the last token
    assert ring.computed_tokens == 120 - 96
    assert (ring.value("host_hits_total"), ring.value("host_loads_total")) == (1, 1)
    account = ring.pages.account()
    assert account.pinned == 0


def test_an_evicted_page_is_free_only_when_it_is_copied() -> None:
    ring = RingWithHost()
    ring.run(a_job("a", 120, prefix=1))
    ring.submit(a_job("b", 120, prefix=2))
    for _ in range(5):
        assert not any(isinstance(one, Opened) for one in ring.step(ends=lambda: False))
    assert ring.copying
    assert ring.pages.account().pinned > 0

    events = [*ring.step(), *ring.step()]

    assert opened(events, "b#1") == 0


def test_blocks_without_room_in_host_memory_are_lost_as_before() -> None:
    ring = RingWithHost(host_pages=1)  # less than a block
    ring.run(a_job("a", 120, prefix=1))
    ring.run(a_job("b", 120, prefix=2))
    ring.computed_tokens = 0
    ring.run(a_job("again", 120, prefix=1))
    assert ring.computed_tokens == 120
    assert not ring.in_host


def test_what_is_cheaper_to_compute_is_computed() -> None:
    ring = RingWithHost()
    ring.control.admission.load_pays = lambda tokens: False
    ring.run(a_job("a", 120, prefix=1))
    ring.run(a_job("b", 120, prefix=2))
    ring.computed_tokens = 0
    ring.run(a_job("again", 120, prefix=1))
    assert ring.computed_tokens > 24
    assert ring.value("host_loads_total") == 0


def test_several_prompts_with_one_prefix_load_it_once() -> None:
    ring = RingWithHost(pages=20)
    ring.run(a_job("a", 120, prefix=1))
    ring.run(a_job("b", 300, prefix=2))
    ring.computed_tokens = 0
    ring.run(*(a_job(f"again{number}", 120, prefix=1) for number in range(3)))
    assert ring.value("host_loads_total") == 1
    assert ring.computed_tokens == 3 * 24


def test_a_job_that_leaves_during_its_load_leaves_the_blocks_behind() -> None:
    ring = RingWithHost()
    ring.run(a_job("a", 120, prefix=1))
    ring.run(a_job("b", 120, prefix=2))
    again = a_job("again", 120, prefix=1)
    ring.submit(again)
    for _ in range(20):
        ring.step(ends=lambda: not any(not to_host for _, _, to_host, _ in ring.copying))
        if any(not to_host for _, _, to_host, _ in ring.copying):
            break
    assert ring.control.close(again.key, abort=True)
    ring.run()
    assert ring.here >= set(again.block_hashes[:3])
    assert ring.pages.account().pinned == 0


def test_a_ring_loads_each_page_on_the_rank_that_kept_it() -> None:
    ring = RingWithHost(ring_size=2, pages=8)
    ring.run(a_job("a", 180, prefix=1))
    ring.run(a_job("b", 180, prefix=2))
    ring.computed_tokens = 0
    events = ring.run(a_job("again", 180, prefix=1))  # `step` looks at the rows
    assert opened(events, "again#1") == 160
    assert ring.computed_tokens == 20


def test_i8_tenants_share_no_block_in_host_memory() -> None:
    def job(name: str, tenant: str) -> Job:
        prompt = np.arange(120, dtype=np.int32)
        seed = prefix_hash.seed(fingerprint=b"f", tenant_salt=Tenant(tenant).salt)
        hashes = tuple(prefix_hash.chain(seed, prompt, block_tokens=BLOCK))
        ref = common_pb2.RequestRef(request_id=name, attempt=1)
        return Job(ref, prompt, Sampling(max_tokens=8), block_hashes=hashes)

    ring = RingWithHost()
    ring.run(job("mine", "mine"))
    ring.run(a_job("other", 120, prefix=9))
    events = ring.run(job("yours", "yours"))
    assert opened(events, "yours#1") == 0
    assert ring.value("host_hits_total") == 0
    assert opened(ring.run(job("mine again", "mine")), "mine again#1") == 96


@settings(max_examples=60, deadline=None)
@given(
    rng=st.randoms(use_true_random=False),
    ring_size=st.sampled_from([1, 2, 3]),
    pages=st.integers(8, 14),
    host_pages=st.sampled_from([1, 2, 7, 12, 40]),
    jobs=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 120), st.booleans()), min_size=1, max_size=14),
)
def test_whatever_comes_all_are_served_from_the_right_rows(
    rng: random.Random, ring_size: int, pages: int, host_pages: int, jobs: list[tuple[int, int, bool]]
) -> None:
    ring = RingWithHost(ring_size=ring_size, pages=pages, host_pages=host_pages)

    def ends() -> bool:
        return rng.random() < 0.4

    computed: set[str] = set()
    for number, (prefix, tokens, is_cancelled) in enumerate(jobs):
        job = a_job(f"j{number}", tokens, prefix=prefix)
        ring.submit(job)
        for event in ring.step(ends=ends):
            computed |= {event.key} if isinstance(event, Computed) else set()
        if is_cancelled:
            ring.control.close(job.key, abort=True)
    events = ring.run(ends=ends)

    assert not ring.control.phases()
    account = ring.pages.account()
    assert account.pinned == account.quarantined == 0
    assert ring.here == set(ring.pages.cached_hashes())
    host = ring.pages.host
    assert host is not None
    assert host.counters.values["host_bytes"] <= host_pages * ring_size * 1000
    assert host.counters.values["host_blocks"] == len(ring.in_host)
    assert not [one for one in events if isinstance(one, CacheChanged) and set(one.added) & set(one.removed)]


def test_loading_is_weighed_against_computing() -> None:
    fitted = Fitted(start_s=0.0, first_s=1e-3, second_s=0.0, observations=20)
    assert load_pays(Span(0, 64), None, token_s=1.0, chunk_tokens=64)
    assert load_pays(Span(0, 64), fitted, token_s=5e-4, chunk_tokens=64)
    assert not load_pays(Span(0, 64), fitted, token_s=1e-3, chunk_tokens=64)
    deep = Fitted(start_s=0.0, first_s=1e-4, second_s=1e-6, observations=20)
    assert not load_pays(Span(0, 64), deep, token_s=5e-4, chunk_tokens=64)
    assert load_pays(Span(6400, 6464), deep, token_s=5e-4, chunk_tokens=64)  # deep in a prompt computing costs more
