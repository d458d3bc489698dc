"""A split fleet on a simulated clock: arrivals of a trace, placement, prefill chunks, decode steps, index changes.

Discrete events, seeded, one core. The nodes are simulated; what places the requests is the code that the router runs.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.bench.sim_nodes import BlockCache, Job, SimDecode, SimPrefill
from kvrelay.bench.sim_policies import Policy, with_load
from kvrelay.bench.trace import Arrival, Trace
from kvrelay.core.clock import ManualClock
from kvrelay.core.types import Incarnation, Role
from kvrelay.index.mirror_state import Change, Holder, MirrorState
from kvrelay.router.cost import NodeCost
from kvrelay.router.fleet import NodeView

_PAGE_TOKENS = 64
_TIMED_EVERY = 32  # decisions; where system calls are slow, to read the clock takes half as long as one


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """What the fleet is made of, and how its index behaves."""

    prefill_nodes: int = 8
    decode_nodes: int = 4
    node_tokens: int = 3_000_000  # of cache per prefill node
    decode_tokens: int = 8_000_000  # of room per decode node
    cost: NodeCost
    chunk_tokens: int = 8192
    heartbeat_s: float = 2.0
    stale_s: float = 0.0  # the index is this late
    lost_events: float = 0.0  # share of its changes that never arrive
    heal_s: float = float("inf")  # a snapshot follows a loss after this time
    tbt_target_s: float = float("inf")  # gaps between tokens that are longer count as slow
    seed: int = 0


class Events:
    """What will happen, in the order of time; the clock shows the time of what happens now."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when_s: float, happens: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (max(when_s, self.clock.now_s), self._count, happens))

    def run(self) -> None:
        while self._queue:
            self.clock.now_s, _, happens = heapq.heappop(self._queue)
            happens()


class FakeIndex:
    """Brings the changes of simulated nodes to a mirror: late, and not all of them."""

    def __init__(self, mirror: MirrorState, events: Events, plan: FleetPlan) -> None:
        self._mirror = mirror
        self._events = events
        self._plan = plan
        self._rng = random.Random(plan.seed)  # noqa: S311 - a simulation, not a secret
        self._numbers: dict[Holder, int] = {}
        self._heals = plan.heal_s != float("inf")
        self._held: dict[Holder, dict[bytes, None]] = {}  # for its snapshots

    def told(self, holder: Holder, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        number = self._numbers[holder] = self._numbers.get(holder, 0) + 1
        if self._heals:
            held = self._held.setdefault(holder, {})
            held.update(dict.fromkeys(added))
            for one in removed:
                held.pop(one, None)
        if self._rng.random() < self._plan.lost_events:
            if self._heals:
                self._events.at(self._events.clock() + self._plan.heal_s, lambda: self._snapshot(holder))
            return
        change = Change(holder, number, tuple(added), tuple(removed))
        self._events.at(self._events.clock() + self._plan.stale_s, lambda: self._mirror.apply(change))

    def _snapshot(self, holder: Holder) -> None:
        self._mirror.replace(holder, number=self._numbers[holder], hashes=list(self._held[holder]))


@dataclass(slots=True)
class Outcome:
    """What a run gave."""

    jobs: list[Job] = field(default_factory=list)
    decision_s: list[float] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)  # per prefill node
    computed_tokens: list[int] = field(default_factory=list)
    hit_blocks: int = 0
    asked_blocks: int = 0


class FleetSim:
    """One run of a trace over a fleet."""

    def __init__(self, plan: FleetPlan, trace: Trace, make_policy: Callable[[MirrorState, Events], Policy]) -> None:
        self._plan = plan
        self._trace = trace
        self.events = Events()
        blocks = plan.node_tokens // trace.block_tokens
        mirror = MirrorState(max_blocks=max(1 << 22, 2 * blocks * plan.prefill_nodes))
        self._index = FakeIndex(mirror, self.events, plan)
        self._policy = make_policy(mirror, self.events)
        self._prefill = {
            node: SimPrefill(node, plan.cost, BlockCache(blocks), plan.chunk_tokens)
            for node in (Incarnation(f"p{at:03}", 1) for at in range(plan.prefill_nodes))
        }
        self._decode = {
            node: SimDecode(node, plan.cost, plan.decode_tokens)
            for node in (Incarnation(f"d{at:03}", 1) for at in range(plan.decode_nodes))
        }
        self._latest: dict[Incarnation, NodeView] = {}
        self._views = [self._view(node) for node in (*self._prefill, *self._decode)]
        self.outcome = Outcome()
        self._open = 0

    def run(self) -> Outcome:
        self._await(0)
        self._open = len(self._trace.arrivals)
        self.events.at(0.0, self._heartbeat)
        self.events.run()
        self.outcome.hit_blocks = sum(node.hit_blocks for node in self._prefill.values())
        self.outcome.work_s = [node.work_s for node in self._prefill.values()]
        self.outcome.computed_tokens = [node.computed_tokens for node in self._prefill.values()]
        return self.outcome

    def _await(self, number: int) -> None:
        """See to the arrival of a request, and then to that of the next one."""
        if number == len(self._trace.arrivals):
            return
        arrival = self._trace.arrivals[number]

        def arrives() -> None:
            self._await(number + 1)
            self._arrive(f"r{number}", arrival)

        self.events.at(arrival.at_s, arrives)

    def _arrive(self, key: str, arrival: Arrival) -> None:
        block_tokens = self._trace.block_tokens
        # The trace names the last, partial block too; to hit it counts, so the prompt is its blocks.
        prompt = max(arrival.prompt_tokens, len(arrival.blocks) * block_tokens)
        job = Job(
            key, self.events.clock(), prompt, max(1, arrival.output_tokens), arrival.blocks, block_tokens,
            tbt_target_s=self._plan.tbt_target_s,
        )  # fmt: skip
        chosen = self._timed(job) if len(self.outcome.jobs) % _TIMED_EVERY == 0 else self._choose(job)
        self.outcome.jobs.append(job)
        if chosen is None:
            self._open -= 1
            return
        prefill, job.where = chosen
        node = self._prefill[prefill]
        self.outcome.asked_blocks += len(job.blocks)
        node.add(job)
        if node.busy_until_s is None:
            self._run_chunk(node)

    def _choose(self, job: Job) -> tuple[Incarnation, Incarnation] | None:
        return self._policy.choose(job, self._views)

    def _timed(self, job: Job) -> tuple[Incarnation, Incarnation] | None:
        began_s = time.thread_time()  # of this process's own work: others on the machine are not the policy's fault
        chosen = self._choose(job)
        self.outcome.decision_s.append(time.thread_time() - began_s)
        return chosen

    def _run_chunk(self, node: SimPrefill) -> None:
        begun = node.begin(self.events.clock())
        if begun is None:
            return
        chunk, ends_s = begun

        def ended() -> None:
            computed = node.ended(chunk)
            if computed is not None:
                self._computed(node, *computed)
            self._run_chunk(node)

        self.events.at(ends_s, ended)

    def _computed(self, node: SimPrefill, job: Job, added: list[bytes], evicted: list[bytes]) -> None:
        job.first_token_s = self.events.clock()
        self._policy.first_token(job)
        if added or evicted:
            self._index.told(Holder(node.node, Role.PREFILL), added, evicted)
        decode = self._decode_of(job, node.node)
        self._end(decode.advance(self.events.clock()))
        if job.output_tokens == 1:
            self._finish(job)
        else:
            decode.join(job)
        self._watch(decode)

    def _decode_of(self, job: Job, prefill: Incarnation) -> SimDecode:
        assert job.where is not None, "chosen with the prefill node"
        return self._decode[job.where]

    def _watch(self, decode: SimDecode) -> None:
        """See to it that the next request to end does; a later change of the batch makes this void."""
        decode.version += 1
        version, ends_s = decode.version, decode.next_end_s()
        if ends_s is None:
            return

        def due() -> None:
            if decode.version == version:
                self._end(decode.advance(self.events.clock()))
                self._watch(decode)

        self.events.at(ends_s, due)

    def _end(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        job.finished_s = self.events.clock()
        self._policy.finished(job)
        job.blocks = ()  # a million requests have too many to keep
        self._open -= 1

    def _heartbeat(self) -> None:
        self._views = [self._view(node) for node in (*self._prefill, *self._decode)]
        if self._open:
            self.events.at(self.events.clock() + self._plan.heartbeat_s, self._heartbeat)

    def _view(self, node: Incarnation) -> NodeView:
        """Return the node's record as of now; the same object as before when nothing has changed."""
        one = self._prefill.get(node) or self._decode[node]
        view = self._latest.get(node)
        if view is not None and not one.has_changed:
            return view
        one.has_changed = False
        if view is None:
            is_prefill = node in self._prefill
            tokens = self._plan.node_tokens if is_prefill else self._plan.decode_tokens
            view = self._plain(node, Role.PREFILL if is_prefill else Role.DECODE, tokens)
        load = self._prefill_load(node, view) if view.role is Role.PREFILL else self._decode_load(node, view)
        if load != (view.queued_tokens, view.active_requests, view.free_pages):
            view = with_load(view, *load)
        self._latest[node] = view
        return view

    def _prefill_load(self, node: Incarnation, view: NodeView) -> tuple[int, int, int]:
        one = self._prefill[node]
        used = len(one.cache) * self._trace.block_tokens // _PAGE_TOKENS
        return one.queued_tokens, len(one.jobs), view.total_pages - used

    def _decode_load(self, node: Incarnation, view: NodeView) -> tuple[int, int, int]:
        running = self._decode[node].running
        used = sum(-(-(job.prompt_tokens + job.output_tokens) // _PAGE_TOKENS) for job in running.values())
        return 0, len(running), max(0, view.total_pages - used)

    def _plain(self, node: Incarnation, role: Role, tokens: int) -> NodeView:
        pages = tokens // _PAGE_TOKENS
        return NodeView(
            incarnation=node, role=role, endpoint="", ring_size=1, layout_fingerprint=b"sim", model="sim",
            dtype="bfloat16", max_model_len=1 << 30, block_tokens=self._trace.block_tokens, page_tokens=_PAGE_TOKENS,
            total_pages=pages, free_pages=pages, active_requests=0, queued_tokens=0, draining=False,
            cost=self._plan.cost,
        )  # fmt: skip
