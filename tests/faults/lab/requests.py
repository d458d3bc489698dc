"""Requests whose right answers are known."""

from __future__ import annotations

import threading
import time

import grpc

from cluster.cluster import Answer, Client, GenerateCall, status_of
from faults.lab.workload import golden, prompt

TOKENS = 600


def right(fleet: Client, seed: int, *, num_tokens: int = TOKENS, output: int = 12) -> None:
    answer = fleet.generate(prompt(seed, num_tokens), max_tokens=output, timeout_s=40)
    assert tuple(answer.token_ids) == golden(seed, num_tokens, output)


class Watched:
    """A request in the background."""

    def __init__(
        self, fleet: Client, seed: int, *, num_tokens: int = TOKENS, output: int = 12, timeout_s: float = 40
    ) -> None:
        self.answer = Answer()
        self.error: grpc.RpcError | None = None
        self._asked = seed, num_tokens, output
        self.call: GenerateCall = fleet.start(prompt(seed, num_tokens), max_tokens=output, timeout_s=timeout_s)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for event in self.call:
                self.answer.take(event, time.monotonic())
        except grpc.RpcError as err:
            self.error = err

    def end(self, within_s: float) -> None:
        self._thread.join(within_s)
        assert not self._thread.is_alive(), f"the client still waits after {within_s} s"

    def assert_right(self, within_s: float = 40) -> None:
        self.end(within_s)
        assert self.error is None, status_of(self.error)
        assert tuple(self.answer.token_ids) == golden(*self._asked)
