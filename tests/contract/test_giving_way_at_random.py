"""Chunks that are paused, given up, failed and ticketed between any two layers, drawn from seeds: nobody is lost."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import cast

import numpy as np
import pytest
import torch

from contract.prefill_requests import MODEL, NEEDS_RECORDING
from contract.ring_ranks import PAGE_TOKENS, Case, Outcome, RecordingWriter, a_control, a_pool, alone
from kvrelay.core import prefix_hash
from kvrelay.core.errors import TransferError
from kvrelay.core.types import Counters, Sampling
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.model.transformer import Model
from kvrelay.prefill_node.chunk_plan import ChunkPlanner
from kvrelay.prefill_node.follower import follow
from kvrelay.prefill_node.group import Leave, RingGroup
from kvrelay.prefill_node.job_events import Done, Failed, FirstToken, JobEvent
from kvrelay.prefill_node.jobs import Job
from kvrelay.prefill_node.leader import Leader
from kvrelay.prefill_node.rank import RankWorker
from kvrelay.prefill_node.ring import Ring
from kvrelay.prefill_node.scheduler import MOST_PAUSED
from kvrelay.proto.v1 import common_pb2, handoff_pb2
from oracle_data import FOLDER
from ring_of_threads import ThreadGroup, Wires

LENGTHS = (7, 20, 64, 65, 150, 333)
REQUESTS = 10
CASE = Case(FOLDER / MODEL, (1,), chunk_tokens=100, ring_block_tokens=60, num_pages=20)


@cache
def model() -> Model:
    return load_model(CASE.folder, dtype="float32", device=torch.device("cpu"))


def ids_of(length: int) -> tuple[int, ...]:
    return tuple((np.arange(length) * 5 % 250).tolist())


@cache
def undisturbed(length: int) -> Outcome:
    return alone(Case(CASE.folder, ids_of(length), chunk_tokens=4096))


class Writer(RecordingWriter):
    @property
    def settled(self) -> bool:
        return self.sealed_with is not None and self.failure is None


class Play:
    """One ring, one seed."""

    def __init__(self, seed: int, size: int) -> None:
        self.dice = random.Random(f"{seed} {size}")
        wires = Wires(size)
        self.writers: list[dict[str, Writer]] = [{} for _ in range(size)]
        self.groups = [cast(RingGroup, ThreadGroup(rank, wires)) if size > 1 else None for rank in range(size)]
        self.counters = Counters()
        self.workers = [self._worker(rank) for rank in range(size)]
        self.control = a_control(CASE, size)
        self.control._max_jobs = REQUESTS
        self.leader = Leader(
            self.control, self.workers[0], self.groups[0], token_bytes=1, on_cache=lambda _: None,
            counters=self.counters, give_way_s=self.dice.choice([0.0, 1e-6]),
        )  # fmt: skip
        self.told: dict[str, list[JobEvent]] = {}
        self.lengths: dict[str, int] = {}
        self.given_up: set[str] = set()
        self.tickets: list[handoff_pb2.Ticket] = []
        self.all_over = threading.Event()
        self._say, self.leader._watch.ask = self.leader._watch.ask, self._ask  # type: ignore[method-assign]

    def _worker(self, rank: int) -> RankWorker:
        pool, counters = a_pool(model(), CASE.num_pages), self.counters if rank == 0 else Counters()
        ring = Ring(self.groups[rank], pool, counters)
        planner = ChunkPlanner(
            rank=rank, ring_size=ring.size, align_tokens=1, ring_block_tokens=CASE.ring_block_tokens, device=pool.device
        )
        return RankWorker(
            model(), pool, ring, open_writer=lambda ticket: self._open(rank, pool, ticket), planner=planner,
            counters=counters,
        )  # fmt: skip

    def _open(self, rank: int, pool: LatentPool, ticket: handoff_pb2.Ticket) -> Writer:
        return self.writers[rank].setdefault(f"{ticket.request.request_id}#1", Writer(pool))

    def submit(self) -> None:
        if len(self.told) == REQUESTS:
            return
        length = self.dice.choice(LENGTHS)
        ids = np.array(ids_of(length), dtype=np.int32)
        ref = common_pb2.RequestRef(request_id=f"r{len(self.told)}", attempt=1)
        ticket = handoff_pb2.Ticket(request=ref, prompt_tokens=length)
        hashes = prefix_hash.chain(b"s" * 32, ids, block_tokens=PAGE_TOKENS) if self.dice.random() < 0.6 else ()
        is_late = len(self.workers) == 1 and self.dice.random() < 0.4
        job = Job(
            ref, ids, Sampling(max_tokens=8), block_hashes=tuple(hashes), ticket=None if is_late else ticket,
            ticket_follows=is_late,
        )  # fmt: skip
        events = self.told[job.key] = []
        self.lengths[job.key] = length
        if is_late:
            self.tickets.append(ticket)

        def sink(event: JobEvent) -> None:
            events.append(event)
            if isinstance(event, Done | Failed):
                self.submit()
                if len(self.told) == REQUESTS and not self._alive():
                    self.all_over.set()

        self.leader.submit(job, sink)

    def _alive(self) -> list[str]:
        return [key for key, events in self.told.items() if not any(isinstance(one, Done | Failed) for one in events)]

    def bring_ticket(self) -> None:
        if self.tickets:
            ticket = self.tickets.pop(self.dice.randrange(len(self.tickets)))
            self.leader.give_ticket(f"{ticket.request.request_id}#1", ticket)

    def _ask(self, layer: int, num_layers: int) -> Leave:
        watch, scheduler, dice = self.leader._watch, self.control.scheduler, self.dice
        assert watch._chunk is not None
        key = watch._chunk.request_id
        self._strike()
        said = self._say(layer, num_layers)
        may = watch._asked > 1 and layer < num_layers - (len(self.workers) > 1) and scheduler.may_pause(key)
        if said is Leave.NO and may and dice.random() < 0.35:
            waiting = [one.key for one in scheduler.waiting_beside(key)] + list(watch.arriving)
            watch._favoured = dice.choice([*waiting, None])
            said = Leave.PAUSE
        assert len(scheduler._paused()) <= MOST_PAUSED
        return said

    def _strike(self) -> None:
        dice = self.dice
        if dice.random() < 0.15:
            self.submit()
        if dice.random() < 0.3:
            self.bring_ticket()
        if dice.random() < 0.05:
            key = dice.choice(self._alive())
            self.given_up.add(key)
            how = dice.choice(["cancel", "fail", "reader"])
            if how == "cancel":
                self.leader.cancel(key, "not wanted any more")
            elif how == "fail":
                self.leader.fail(key, TransferError("no ticket"))
            elif (writer := dice.choice(self.writers).get(key)) is not None:
                writer.failure = "decode is gone"

    def run(self) -> None:
        self.submit()
        self.submit()
        with ThreadPoolExecutor(len(self.workers)) as ranks:
            others = zip(self.workers[1:], self.groups[1:], strict=True)
            ended = [ranks.submit(follow, worker, cast(RingGroup, group)) for worker, group in others]
            ended.append(ranks.submit(self.leader.run))
            for _ in range(3000):
                if self.all_over.wait(0.01) or any(one.done() for one in ended):
                    break
                self.leader.call(lambda _: self.bring_ticket())  # else nothing may be left to do
            gone = threading.Event()
            for _ in range(1000):
                self.leader.call(lambda control: None if control.active_jobs + control.closing_jobs else gone.set())
                if gone.wait(0.01) or any(one.done() for one in ended):
                    break
            self.leader.shut_down()
            for one in ended:
                one.result(40)


@NEEDS_RECORDING
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 12))])
def test_whatever_comes_between_two_layers_each_request_ends_once_and_rightly(size: int, seed: int) -> None:
    play = Play(seed, size)
    play.run()

    for key, events in play.told.items():
        (last,) = (event for event in events if isinstance(event, Done | Failed))
        assert isinstance(last, Done) or key in play.given_up, (key, last)
        if isinstance(last, Done):
            wanted = undisturbed(play.lengths[key])
            assert [one.token.token_id for one in events if isinstance(one, FirstToken)] == [wanted.token], key
            sent = [writers[key] for writers in play.writers]
            assert all(one.sealed_with is not None and not one.twice for one in sent), key
            rows = {place: row for one in sent for place, row in one.rows.items()}
            assert rows.keys() == wanted.rows.keys(), key
            assert max(np.abs(row - wanted.rows[place]).max() for place, row in rows.items()) < 1e-3, key
    account = play.control.account()
    assert account.free + account.cached == account.total
    play.control._pages.check()
    assert not any(worker._requests for worker in play.workers)
    leader, watch = play.leader, play.leader._watch
    left = (leader._jobs, leader._sinks, leader._tickets, leader._opened_s, watch.arriving, watch.cancelled)
    assert not any((*left, watch._earlier_s, watch._left_at_s, watch._was_left, play.control._computing))
