"""Real clusters for tests: `kvrelay up` as a subprocess, a client for it, and what must hold when nothing runs."""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, cast

import grpc
import psutil

from kvrelay.bench import local_cluster
from kvrelay.proto.v1 import (
    common_pb2,
    decode_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2_grpc,
)
from warm_start import command_line

SETTLE_S = 20.0
CALL_S = 5.0
MESSAGE_BYTES = 256 << 20
# Sessions in these states hold nothing.
ENDED_SESSIONS = {"released", "free"}


class GenerateCall(Protocol):
    """A Generate call under way."""

    def __iter__(self) -> Iterator[inference_pb2.GenerateEvent]: ...

    def cancel(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Spec:
    """One cluster; a test module has one as SPEC."""

    model: Path
    ring_size: str = "1"
    prefill: int | None = None
    decode: int = 1
    chunk_tokens: int | None = None
    max_model_len: int = 2048
    pool_pages: int = 256
    dtype: str = "float32"
    latent_format: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> list[str]:
        found = ["--model", str(self.model), "--ring-size", self.ring_size, "--decode", str(self.decode)]
        found += ["--max-model-len", str(self.max_model_len), "--dtype", self.dtype]
        found += ["--prefill", str(self.prefill)] if self.prefill else []
        found += ["--latent-format", self.latent_format] if self.latent_format else []
        return found + (["--chunk-tokens", str(self.chunk_tokens)] if self.chunk_tokens else [])

    @property
    def variables(self) -> dict[str, str]:
        pages = str(self.pool_pages)
        return {
            "OMP_NUM_THREADS": "1",
            "KVRELAY_PREFILL_POOL_PAGES": pages,
            "KVRELAY_DECODE_POOL_PAGES": pages,
            # These tests are about the hand-off; `test_local_prefill` is about what decode computes itself.
            "KVRELAY_DECODE_LOCAL_PREFILL_TOKENS": "0",
            "KVRELAY_PREFILL_PULL_TIMEOUT_S": "0",  # and `test_pull` about what prefill fetches
            **self.environ,
        }


@dataclass(slots=True)
class Answer:
    """Everything that one Generate call said."""

    accepted: inference_pb2.Accepted = field(default_factory=inference_pb2.Accepted)
    finished: inference_pb2.Finished = field(default_factory=inference_pb2.Finished)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[common_pb2.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)  # from the second prompt token on
    progress: list[inference_pb2.Progress] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)  # since the call, per Tokens event

    def take(self, event: inference_pb2.GenerateEvent, at_s: float) -> None:
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self.accepted = event.accepted
        elif kind == "progress":
            self.progress.append(event.progress)
        elif kind == "tokens":
            self.token_ids += event.tokens.token_ids
            self.text += event.tokens.text
            self.logprobs += event.tokens.logprobs
            self.token_times_s.append(at_s)
        elif kind == "prompt_logprobs":
            assert event.prompt_logprobs.first_position == 1 + len(self.prompt_logprobs), "a gap or a repetition"
            assert not self.token_ids, "prompt log-probabilities come before the first token"
            self.prompt_logprobs += event.prompt_logprobs.logprobs
        else:
            self.finished = event.finished

    @property
    def usage(self) -> inference_pb2.Usage:
        return self.finished.usage


class Client:
    """Asks a cluster that runs somewhere, and looks at its nodes."""

    def __init__(self, channel: grpc.Channel, *, dial: Callable[[str], grpc.Channel] | None = None) -> None:
        """`dial` connects to a node by its address; without it, in plain text."""
        self._channel = channel
        self._dial = dial or _connect
        self.inference = inference_pb2_grpc.InferenceStub(self._channel)
        self.fleet = fleet_pb2_grpc.FleetStub(self._channel)

    # -- requests

    def start(self, prompt: Sequence[int] | str, *, timeout_s: float = 60.0, **sampling: Any) -> GenerateCall:
        """Begin a request; keyword arguments are fields of Sampling."""
        return self.inference.Generate(a_request(prompt, **sampling), timeout=timeout_s)

    def generate(self, prompt: Sequence[int] | str, *, timeout_s: float = 60.0, **sampling: Any) -> Answer:
        """Run a request to its end.

        Raises:
            grpc.RpcError: it failed.
        """
        began_s = time.monotonic()
        return finish(self.start(prompt, timeout_s=timeout_s, **sampling), began_s=began_s)

    def finish_all(self, calls: Sequence[GenerateCall]) -> list[Answer]:
        """Read calls that are under way at once to their ends."""
        began_s = time.monotonic()
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(lambda call: finish(call, began_s=began_s), calls))

    # -- what runs

    def nodes(self) -> list[fleet_pb2.NodeRecord]:
        return list(self.fleet.ListNodes(fleet_pb2.ListNodesRequest(), timeout=CALL_S).nodes)

    def stats(self) -> dict[str, common_pb2.NodeStats]:
        """Return every node's own accounting, by node name."""
        return {record.node.name: self._stats_of(record) for record in self.nodes()}

    def counter(self, name: str, *, role: str) -> float:
        """Return a counter summed over the nodes of a role; per node it is the sum over ranks."""
        return sum(stats.counters.get(name, 0.0) for node, stats in self.stats().items() if node.startswith(role))

    def _stats_of(self, record: fleet_pb2.NodeRecord) -> common_pb2.NodeStats:
        with self._dial(record.endpoint) as channel:
            if record.role == fleet_pb2.NODE_ROLE_PREFILL:
                return prefill_pb2_grpc.PrefillNodeStub(channel).Stats(common_pb2.StatsRequest(), timeout=CALL_S)
            return decode_pb2_grpc.DecodeNodeStub(channel).Stats(common_pb2.StatsRequest(), timeout=CALL_S)

    # -- invariants

    def unsettled(self) -> list[str]:
        """Return what is wrong for a cluster that has nothing to do."""
        found = []
        for name, stats in self.stats().items():
            accounted = stats.free_pages + stats.cached_pages + stats.pinned_pages + stats.quarantined_pages
            if stats.total_pages != accounted:
                found.append(f"{name}: {stats.total_pages} pages in all but {accounted} accounted for")
            held = ("pinned_pages", "quarantined_pages", "active_requests", "queued_requests")
            found += [f"{name}: {what} = {getattr(stats, what)}" for what in held if getattr(stats, what)]
            open_sessions = {
                state: n for state, n in stats.sessions.items() if n and state.lower() not in ENDED_SESSIONS
            }
            if open_sessions:
                found.append(f"{name}: sessions {open_sessions}")
        return found

    def assert_settled(self, timeout_s: float = SETTLE_S) -> None:
        """Wait until nothing is held for any request; fail with what is."""
        wait_until(lambda: not self.unsettled(), timeout_s, lambda: "\n".join(self.unsettled()))

    def close(self) -> None:
        self._channel.close()


class Cluster(Client):
    """A cluster of processes that a test started, and a client for it. Created by `running`."""

    def __init__(self, local: local_cluster.LocalCluster) -> None:
        super().__init__(_connect(local.endpoint))
        self.local = local
        self.endpoint = local.endpoint

    def process(self, name: str, *, rank: int | None = None) -> psutil.Process:
        """Return a process of the cluster: `router`, a node by name, one rank of it, or `index`."""
        if name == "index":
            return next(one for one in self.local.processes() if "valkey" in one.name() or "redis" in one.name())
        top = next(one for one in self.local.processes() if _has_name(one, name))
        if not rank:
            return top
        return next(one for one in top.children(recursive=True) if _environ(one).get("RANK") == str(rank))

    def logs(self) -> str:
        """Return what `up` said and the end of every process's log."""
        said = self.local.said()
        found = re.search(r"logs in (\S+)", said)
        files = sorted(Path(found[1]).glob("*.log")) if found else []
        return "\n".join([said, *(f"--- {file.name}\n{file.read_text()[-4000:]}" for file in files)])


@contextmanager
def running(spec: Spec) -> Iterator[Cluster]:
    """Run a cluster for as long as the block lasts."""
    with (
        TemporaryDirectory(prefix="kvrelay-test-") as folder,  # `up` leaves its logs in a folder under TMPDIR
        local_cluster.running(spec.options, environ={**spec.variables, "TMPDIR": folder}) as local,
    ):
        cluster = Cluster(local)
        try:
            yield cluster
        finally:
            cluster.close()


def a_request(prompt: Sequence[int] | str, **sampling: Any) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(sampling=common_pb2.Sampling(**sampling))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokens.packed_ids = struct.pack(f"<{len(prompt)}I", *prompt)
    return request


def finish(call: GenerateCall, *, began_s: float) -> Answer:
    """Read a call to its end."""
    answer = Answer()
    for event in call:
        answer.take(event, time.monotonic() - began_s)
    assert answer.finished.reason, "the stream ended without a Finished event"
    return answer


def status_of(err: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Return (code, text) of a failed call."""
    call = cast(grpc.Call, err)  # a failed call is both, which the stubs cannot say
    return call.code(), call.details() or ""


def wait_until(holds: Any, timeout_s: float, explain: Any = lambda: "") -> None:
    """Poll until `holds()`, else fail with `explain()`; while a node cannot be reached it does not hold."""
    until_s = time.monotonic() + timeout_s
    while not _true(holds):
        if time.monotonic() > until_s:
            raise AssertionError(f"not within {timeout_s} s: {explain()}")
        time.sleep(0.05)


def events(stdout: str) -> list[dict[str, Any]]:
    """Return the JSON objects that `generate --json` printed."""
    return [json.loads(line) for line in stdout.splitlines()]


def _true(holds: Any) -> bool:
    try:
        return bool(holds())
    except grpc.RpcError:
        return False


def _connect(endpoint: str) -> grpc.Channel:
    limits = [("grpc.max_send_message_length", MESSAGE_BYTES), ("grpc.max_receive_message_length", MESSAGE_BYTES)]
    return grpc.insecure_channel(endpoint, options=limits)


def _has_name(process: psutil.Process, name: str) -> bool:
    words = command_line(process)
    return "--name" in words and words[words.index("--name") + 1] == name


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def vocab_size(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])
