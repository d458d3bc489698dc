"""Real rank processes over Gloo that compute recorded prompts; the latents they would relay go to a file per rank."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from contract.scripted_pauses import Beside, Played, Scene
from kvrelay.core import prefix_hash
from kvrelay.core.shard import Span
from kvrelay.core.types import Counters, SampledToken, Sampling
from kvrelay.kv_transfer.plan import Pages
from kvrelay.kvcache.host_store import HostStore
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.model.transformer import Model
from kvrelay.prefill_node.chunk_plan import ChunkPlanner
from kvrelay.prefill_node.control import RingControl
from kvrelay.prefill_node.follower import follow
from kvrelay.prefill_node.group import RingGroup, form, serve_store
from kvrelay.prefill_node.host_copier import HostCopier
from kvrelay.prefill_node.job_events import Done, Failed, FirstToken, JobEvent
from kvrelay.prefill_node.jobs import Job
from kvrelay.prefill_node.leader import Leader
from kvrelay.prefill_node.pages import RingPages
from kvrelay.prefill_node.rank import RankWorker
from kvrelay.prefill_node.ring import Ring
from kvrelay.prefill_node.settings import RankPlace
from kvrelay.proto.v1 import common_pb2, handoff_pb2

PAGE_TOKENS = 64
NUM_PAGES = 64
Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """One prompt, computed by the ring of its launch."""

    folder: Path
    prompt: tuple[int, ...]
    chunk_tokens: int
    align_tokens: int = 1
    ring_block_tokens: int = 4096
    resident_tokens: int = 0
    block_hashes: tuple[bytes, ...] = ()
    prompt_logprobs: bool = False
    max_tokens: int = 8
    handoff_failure: str | None = None  # of every rank, from the start
    before: tuple[tuple[int, ...], ...] = ()  # prompts that the ring computes first; the outcome is of the last one
    seed: bytes = b""  # of the block hashes of all of them
    num_pages: int = NUM_PAGES  # of a rank
    host_pages: int = 0  # of a rank, for what leaves these
    latent_format: str = "model"
    script: tuple[Scene, ...] = ()  # what happens while the last prompt is computed
    ticket_follows: bool = False  # in a pause
    beside: tuple[tuple[int, ...], ...] = ()  # prompts that come in its pauses, of lengths that differ


@dataclass
class RecordingWriter:
    """Keeps a copy of every row that is handed over for relaying, as it is at that moment."""

    pool: LatentPool
    rows: dict[tuple[int, int], Array] = field(default_factory=dict)  # (layer, position) -> row
    twice: int = 0
    sealed_with: tuple[SampledToken | None, int] | None = None
    failure: str | None = None

    def add_part(self, layer: int, tokens: Span, src_pages: Pages) -> None:
        positions = range(tokens.start, tokens.end)
        slots = [src_pages[one // PAGE_TOKENS] * PAGE_TOKENS + one % PAGE_TOKENS for one in positions]
        rows = self.pool.read(layer, torch.tensor(slots, device=self.pool.device)).cpu().numpy()
        for position, row in zip(positions, rows, strict=True):
            self.twice += (layer, position) in self.rows
            self.rows[layer, position] = row

    def seal(self, *, first_token: SampledToken | None, cached_tokens: int) -> None:
        self.sealed_with = (first_token, cached_tokens)

    def abort(self, reason: str) -> None:
        self.failure = reason

    @property
    def settled(self) -> bool:
        return self.sealed_with is not None

    @property
    def sources_free(self) -> bool:
        return True


@dataclass
class Outcome:
    """What one rank saw of one case."""

    rows: dict[tuple[int, int], Array]
    twice: int
    sealed: bool
    counters: dict[str, float]
    token: int | None = None  # rank 0 only
    cached_tokens: int = 0
    error: str | None = None
    told: list[JobEvent] = field(default_factory=list)  # rank 0 only
    beside: list[Beside] = field(default_factory=list)
    held: tuple[int, int] = (0, 0)  # requests that this rank still has, and pages that are not free (rank 0 only)


def compute(
    model: Model, case: Case, group: RingGroup | None, pool: LatentPool, control: RingControl | None
) -> Outcome:
    """Run one case on this rank; all ranks of the ring call it together. `control` is rank 0's."""
    counters = Counters()
    ring = Ring(group, pool, counters)
    writers: dict[int, RecordingWriter] = {}  # by the length of the prompt: the last of its kind

    def open_writer(ticket: handoff_pb2.Ticket) -> RecordingWriter:
        writers[ticket.prompt_tokens] = RecordingWriter(pool, failure=case.handoff_failure)
        return writers[ticket.prompt_tokens]

    planner = ChunkPlanner(
        rank=ring.rank,
        ring_size=ring.size,
        align_tokens=case.align_tokens,
        ring_block_tokens=case.ring_block_tokens,
        device=pool.device,
    )
    worker = RankWorker(model, pool, ring, open_writer=open_writer, planner=planner, counters=counters)
    leaders: list[Leader] = []  # this rank's, if it leads

    def wake() -> None:
        for leader in leaders:
            leader.wake()

    if case.host_pages:
        store = HostStore(pool, case.host_pages)
        worker.copier = HostCopier(store, counters=counters, wake=wake)
    told: list[JobEvent] = []
    played: Played | None = None
    if control is None:
        assert group is not None
        follow(worker, group)
    else:
        leader = Leader(control, worker, group, token_bytes=1, on_cache=lambda _: None, counters=counters)
        leaders.append(leader)
        if case.script:
            played = Played(
                leader,
                case.script,
                case.beside,
                key=f"case{len(case.before) + 1}#1",
                num_tokens=len(case.prompt),
                writers=writers,
            )
        told = _lead(case, leader, played)
        for held in control.host_counters:
            counters.values.update(held.values)
    tokens = [event.token.token_id for event in told if isinstance(event, FirstToken)]
    errors = [str(event.error) for event in told if isinstance(event, Failed)]
    writer = writers[len(case.prompt)]
    sealed = writer.sealed_with is not None
    cached = writer.sealed_with[1] if writer.sealed_with else 0
    return Outcome(
        writer.rows, writer.twice, sealed, dict(counters.values), tokens[0] if tokens else None, cached,
        errors[0] if errors else None, told,
        [Beside(writers[len(prompt)].rows, played.token(prompt) if played else None) for prompt in case.beside],
        (len(worker._requests), 0 if control is None else control.account().total - control.account().free),
    )  # fmt: skip


def a_control(case: Case, ring_size: int) -> RingControl:
    pages = RingPages(
        pages_per_rank=[case.num_pages] * ring_size,
        page_tokens=PAGE_TOKENS,
        block_tokens=PAGE_TOKENS,
        chunk_tokens=case.chunk_tokens,
        align_tokens=case.align_tokens,
        host_pages_per_rank=[case.host_pages] * ring_size if case.host_pages else (),
        page_bytes=1,
    )
    return RingControl(pages, block_tokens=PAGE_TOKENS, chunk_tokens=case.chunk_tokens, max_jobs=4, prefix_wait_s=1.0)


def _lead(case: Case, leader: Leader, played: Played | None) -> list[JobEvent]:
    """Run the prompts of a case one after the other; return what was told of the last one."""
    thread = threading.Thread(target=leader.run)
    thread.start()
    events: list[JobEvent] = []
    for number, prompt in enumerate((*case.before, case.prompt), start=1):
        events.clear()
        over = threading.Event()

        def sink(event: JobEvent, over: threading.Event = over) -> None:
            events.append(event)
            if isinstance(event, Done | Failed):
                over.set()

        ticket = handoff_pb2.Ticket(prompt_tokens=len(prompt), resident_tokens=case.resident_tokens)
        ids = np.array(prompt, dtype=np.int32)
        ref = common_pb2.RequestRef(request_id=f"case{number}", attempt=1)
        sampling = Sampling(max_tokens=case.max_tokens, prompt_logprobs=case.prompt_logprobs)
        hashes = case.block_hashes
        if case.seed:
            hashes = tuple(prefix_hash.chain(case.seed, ids, block_tokens=PAGE_TOKENS))
        job = Job(ref, ids, sampling, block_hashes=hashes, ticket=ticket)
        if case.ticket_follows:
            job = replace(job, ticket=None, ticket_follows=True)
        leader.submit(job, sink)
        assert over.wait(60), "the ring has no answer"
    if played is not None:
        played.wait()
    gone = threading.Event()
    for _ in range(1000):
        leader.call(lambda control: gone.set() if not control.active_jobs + control.closing_jobs else None)
        if gone.wait(0.01):
            break
    leader.shut_down()
    thread.join()
    return events


def a_pool(model: Model, num_pages: int = NUM_PAGES, *, latent_format: str = "model") -> LatentPool:
    return LatentPool(model.layout(block_tokens=PAGE_TOKENS, latent_format=latent_format), num_pages, model.device)


def pool_of(model: Model, case: Case) -> LatentPool:
    return a_pool(model, case.num_pages, latent_format=case.latent_format)


def pool_key(case: Case) -> tuple[Path, int, str]:
    """Cases of equal keys share a pool."""
    return case.folder, case.num_pages, case.latent_format


def alone(case: Case) -> Outcome:
    """Compute a case on one rank in this process, without any process group."""
    model = load_model(case.folder, dtype="float32", device=torch.device("cpu"))
    return compute(model, case, None, pool_of(model, case), a_control(case, 1))


def launch(cases: list[Case], ring_size: int, *, device_type: str = "cpu") -> list[list[Outcome]]:
    """Compute all cases with one ring of processes, one GPU each if asked; returns, per case, what each rank saw."""
    store = serve_store(ring_size=ring_size, timeout_s=60.0)
    context: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
    if device_type == "cpu":  # forks of a process that has loaded what ranks need
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "kvrelay.prefill_node.leader"])
    results = context.SimpleQueue()
    others = [
        context.Process(target=_rank_main, args=(rank, ring_size, device_type, store.port, cases, results))
        for rank in range(ring_size)
    ]
    for process in others:
        process.start()
    by_rank = dict(results.get() for _ in range(ring_size))
    for process in others:
        process.join()
        assert process.exitcode == 0
    return [[by_rank[rank][number] for rank in range(ring_size)] for number in range(len(cases))]


def _rank_main(
    rank: int,
    ring_size: int,
    device_type: str,
    port: int,
    cases: list[Case],
    results: multiprocessing.queues.SimpleQueue[tuple[int, list[Outcome]]],
) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    group = None  # a ring of one has no process group at all
    if ring_size > 1:
        store = TCPStore("127.0.0.1", port, ring_size, is_master=False)
        place = RankPlace(rank, ring_size, spawns=False)
        group = form(place, device, store=store, group_timeout_s=20.0, start_timeout_s=60.0)
    models = {case.folder: load_model(case.folder, dtype="float32", device=device) for case in cases}
    pools = {pool_key(case): pool_of(models[case.folder], case) for case in cases}
    outcomes = []
    for case in cases:
        control = a_control(case, ring_size) if rank == 0 else None
        outcomes.append(compute(models[case.folder], case, group, pools[pool_key(case)], control))
    results.put((rank, outcomes))
