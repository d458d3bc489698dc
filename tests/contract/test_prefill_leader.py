"""The step thread of rank 0 while it has nothing to compute."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from contract.prefill_requests import MODEL, NEEDS_RECORDING, a_ref
from contract.ring_ranks import Case, RecordingWriter, a_control, a_pool
from kvrelay.core.types import Counters, Sampling
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.prefill_node.chunk_plan import ChunkPlanner
from kvrelay.prefill_node.giving_way import Turn
from kvrelay.prefill_node.group import Leave
from kvrelay.prefill_node.job_events import FirstToken, JobEvent
from kvrelay.prefill_node.jobs import Job
from kvrelay.prefill_node.leader import Leader
from kvrelay.prefill_node.rank import RankWorker
from kvrelay.prefill_node.ring import Ring
from kvrelay.proto.v1 import handoff_pb2
from oracle_data import FOLDER


class StuckWriter(RecordingWriter):
    """Its reader neither takes the writes nor fails them, until `stuck` is cleared."""

    stuck = True

    @property
    def settled(self) -> bool:
        return False

    @property
    def sources_free(self) -> bool:
        return not self.stuck


@NEEDS_RECORDING
def test_a_hand_off_that_is_stuck_does_not_keep_the_step_thread_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[str] = []
    monkeypatch.setattr(LatentPool, "bind_thread", lambda _: bound.append(threading.current_thread().name))
    case = Case(FOLDER / MODEL, tuple(range(70)), chunk_tokens=128)
    model = load_model(case.folder, dtype="float32", device=torch.device("cpu"))
    pool = a_pool(model)
    counters, control, first, cleared = Counters(), a_control(case, 1), threading.Event(), threading.Event()
    writer = StuckWriter(pool)
    ring = Ring(None, pool, counters)
    planner = ChunkPlanner(rank=0, ring_size=1, align_tokens=1, ring_block_tokens=4096, device=pool.device)
    worker = RankWorker(model, pool, ring, open_writer=lambda _: writer, planner=planner, counters=counters)
    leader = Leader(control, worker, None, token_bytes=1, on_cache=lambda _: None, counters=counters)
    thread = threading.Thread(target=leader.run, name="step", daemon=True)
    thread.start()

    def sink(event: JobEvent) -> None:
        if isinstance(event, FirstToken):
            first.set()

    ticket = handoff_pb2.Ticket(prompt_tokens=70)
    job = Job(a_ref(), np.arange(70, dtype=np.int32), Sampling(max_tokens=8), block_hashes=(), ticket=ticket)
    leader.submit(job, sink)
    assert first.wait(30)
    leader.cancel(job.key, "not wanted any more")
    time.sleep(0.2)
    steps = counters.values["steps"]
    time.sleep(1.5)
    stepped = counters.values["steps"] - steps

    assert leader.load.closing_jobs == 1
    assert stepped <= 5  # 30 at the shortest tick
    writer.stuck = False
    leader.wake()
    leader.wake()
    leader.call(lambda control: cleared.set())
    assert cleared.wait(30)
    leader.shut_down()
    thread.join(30)
    assert (leader.load.closing_jobs, leader.load.free_pages) == (0, 64)
    assert bound == ["step"]  # it took its device before anything else


@NEEDS_RECORDING
def test_short_prompts_are_answered_before_the_long_one_s_chunk_is_over_and_do_not_starve_it() -> None:
    model = load_model(FOLDER / MODEL, dtype="float32", device=torch.device("cpu"))
    case = Case(FOLDER / MODEL, tuple(np.arange(2000) % 250), chunk_tokens=2000)
    pool, counters = a_pool(model), Counters()
    planner = ChunkPlanner(rank=0, ring_size=1, align_tokens=1, ring_block_tokens=4096, device=pool.device)
    ring, writer = Ring(None, pool, counters), RecordingWriter(pool)
    worker = RankWorker(model, pool, ring, open_writer=lambda _: writer, planner=planner, counters=counters)
    leader = Leader(
        a_control(case, 1), worker, None, token_bytes=1, on_cache=lambda _: None, counters=counters, give_way_s=0.001
    )
    answered: list[str] = []
    over = threading.Event()

    def ask(name: str, tokens: int, *, and_again: bool) -> None:
        def sink(event: JobEvent) -> None:
            if isinstance(event, FirstToken):
                answered.append(name)
                if name == "long":
                    over.set()
                elif and_again and not over.is_set():
                    ask(f"{name} again", tokens, and_again=True)

        ids = np.arange(tokens, dtype=np.int32) % 250
        leader.submit(Job(a_ref(), ids, Sampling(max_tokens=2)), sink)

    told = leader._watch.ask

    def first_layer(layer: int, num_layers: int) -> Leave:
        leader._watch.ask = told  # type: ignore[method-assign]
        ask("short", 20, and_again=True)
        return told(layer, num_layers)

    leader._watch.ask = first_layer  # type: ignore[method-assign]
    ask("long", 2000, and_again=False)
    thread = threading.Thread(target=leader.run, name="step", daemon=True)
    thread.start()

    assert over.wait(60)
    leader.shut_down()
    thread.join(30)
    pauses = counters.values["chunk_pauses_total"]
    assert 2 <= pauses < len(model.layers)  # each time the long one has computed a layer
    assert pauses <= answered.index("long") <= 4 * pauses  # of four turns one is the long one's


@NEEDS_RECORDING
def test_a_paused_chunk_of_a_prompt_that_is_given_up_keeps_no_memory_while_its_hand_off_is_stuck() -> None:
    model = load_model(FOLDER / MODEL, dtype="float32", device=torch.device("cpu"))
    case = Case(FOLDER / MODEL, tuple(range(70)), chunk_tokens=128)
    pool, counters, control = a_pool(model), Counters(), a_control(case, 1)
    planner = ChunkPlanner(rank=0, ring_size=1, align_tokens=1, ring_block_tokens=4096, device=pool.device)
    ring, writer = Ring(None, pool, counters), StuckWriter(pool)
    worker = RankWorker(model, pool, ring, open_writer=lambda _: writer, planner=planner, counters=counters)
    ticket = handoff_pb2.Ticket(prompt_tokens=70)
    job = Job(a_ref(), np.arange(70, dtype=np.int32), Sampling(max_tokens=8), block_hashes=(), ticket=ticket)
    control.submit(job, 0.0)
    left = worker.run(control.plan(0.0), lambda layer, _: Leave.PAUSE if layer == 2 else Leave.NO).report
    control.applied([left], Turn(num_layers=len(model.layers)))
    request = worker._requests[job.key]
    assert request.paused is not None
    assert left.layers_left == len(model.layers) - 2

    control.close(job.key, abort=True)
    report = worker.run(control.plan(0.0), lambda *_: Leave.NO).report

    kept = worker._requests[job.key].paused
    assert not report.drained
    assert kept is None
