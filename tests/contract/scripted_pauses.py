"""What happens between the layers of a chunk, as a test has written it: pauses, and what else may come just then."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from kvrelay.core.types import Sampling
from kvrelay.prefill_node.group import Leave
from kvrelay.prefill_node.job_events import Done, Failed, FirstToken, JobEvent
from kvrelay.prefill_node.jobs import Job
from kvrelay.prefill_node.leader import Leader
from kvrelay.proto.v1 import common_pb2, handoff_pb2

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Scene:
    """What strikes before a layer of a chunk, once: a pause, and what comes meanwhile."""

    chunk: int
    layer: int
    what: Literal["pause", "pause and cancel", "pause and fail", "pause and ticket", "cancel", "pause for the next"] = (
        "pause"
    )


@dataclass
class Beside:
    """What one rank relayed of a prompt that came in a pause, and its first token, on rank 0."""

    rows: dict[tuple[int, int], npt.NDArray[np.float32]]
    token: int | None


class Failing(Protocol):
    failure: str | None


@dataclass
class Played:
    """On rank 0, in front of what its leader would say."""

    leader: Leader
    script: Sequence[Scene]
    beside: Sequence[Prompt]
    key: str  # of the prompt whose chunks are paused
    num_tokens: int  # of that prompt
    writers: Mapping[int, Failing]
    told: dict[Prompt, list[JobEvent]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)  # whose layers were asked for, in order

    def __post_init__(self) -> None:
        watch = self.leader._watch
        self._over = {prompt: threading.Event() for prompt in self.beside}
        self._left = list(self.beside)
        self._struck: set[Scene] = set()
        self._starts: list[int] = []
        self._ask, watch.ask = watch.ask, self._answer  # type: ignore[method-assign]

    def _answer(self, layer: int, num_layers: int) -> Leave:
        watch = self.leader._watch
        said = self._ask(layer, num_layers)
        assert watch._chunk is not None
        if said is not Leave.NO or watch._chunk.request_id != self.key:
            return said
        start = watch._chunk.tokens.start
        if start not in self._starts:
            self._starts.append(start)
        for scene in self.script:
            if (scene.chunk, scene.layer) == (self._starts.index(start), layer) and scene not in self._struck:
                self._struck.add(scene)
                return self._strike(scene)
        return said

    def _strike(self, scene: Scene) -> Leave:
        if "cancel" in scene.what:
            self.leader.cancel(self.key, "not wanted any more")
        if "fail" in scene.what:
            for writer in self.writers.values():
                writer.failure = "decode is gone"
        if "ticket" in scene.what:
            self.leader.give_ticket(self.key, handoff_pb2.Ticket(prompt_tokens=self.num_tokens))
        if "for the next" in scene.what:
            self.leader._watch._favoured = self._submit(self._left.pop(0))
        return Leave.PAUSE if "pause" in scene.what else self._ask(scene.layer, scene.layer + 1)

    def _submit(self, prompt: Prompt) -> str:
        told = self.told[prompt] = []

        def sink(event: JobEvent) -> None:
            told.append(event)
            if isinstance(event, Done | Failed):
                self._over[prompt].set()

        ref = common_pb2.RequestRef(request_id=f"beside{len(prompt)}", attempt=1)
        ticket = handoff_pb2.Ticket(prompt_tokens=len(prompt))
        job = Job(ref, np.array(prompt, dtype=np.int32), Sampling(max_tokens=8), ticket=ticket)
        self.leader.submit(job, sink)
        return job.key

    def wait(self) -> None:
        """Wait for those that came in pauses."""
        for over in self._over.values():
            assert over.wait(60), "a prompt that came in a pause has no answer"

    def token(self, prompt: Prompt) -> int:
        (token,) = (event.token.token_id for event in self.told[prompt] if isinstance(event, FirstToken))
        return token
