"""Clients that ask all the time while something happens to the cluster."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Self

import grpc

from cluster.cluster import Answer, Client, a_request, finish, status_of, wait_until
from kvrelay.proto.v1 import inference_pb2


class Load:
    """`clients` threads that each send one request after the other for as long as the block lasts."""

    def __init__(
        self,
        client: Client,
        *,
        clients: int,
        vocab_size: int,
        prompt_tokens: int = 96,
        max_tokens: int = 12,
        is_patient: bool = False,
    ) -> None:
        """`is_patient`: requests of class batch with minutes of time, for more clients than can be served at once."""
        self._client = client
        self._vocab_size = vocab_size
        self._timeout_s = 300.0 if is_patient else 60.0
        self._service_class = (
            inference_pb2.SERVICE_CLASS_BATCH if is_patient else inference_pb2.SERVICE_CLASS_UNSPECIFIED
        )
        self._prompt_tokens, self._max_tokens = prompt_tokens, max_tokens
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        self.num_in_flight = 0
        self.answers: list[Answer] = []
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, count: int, timeout_s: float) -> None:
        """Wait until so many requests have ended, well or not."""
        wait_until(lambda: len(self.answers) + len(self.failures) >= count, timeout_s, lambda: str(self.failures[:5]))

    @property
    def decode_nodes(self) -> Counter[str]:
        """How many answers came from each decode node."""
        with self._lock:
            return Counter(answer.finished.nodes.decode_node for answer in self.answers)

    @property
    def prefill_nodes(self) -> Counter[str]:
        """How many prompts each prefill node computed."""
        with self._lock:
            return Counter(answer.finished.nodes.prefill_node for answer in self.answers)

    def _ask(self, number: int) -> None:
        rng = random.Random(number)
        while not self._ending.is_set():
            prompt = [rng.randrange(self._vocab_size - 1) for _ in range(self._prompt_tokens)]
            request = a_request(prompt, max_tokens=self._max_tokens, ignore_eos=True)
            request.service_class = self._service_class
            call = self._client.inference.Generate(request, timeout=self._timeout_s)
            with self._lock:
                self.num_in_flight += 1
            try:
                answer = finish(call, began_s=time.monotonic())
            except grpc.RpcError as err:
                code, text = status_of(err)
                with self._lock:
                    self.num_in_flight -= 1
                    self.failures.append(f"{code.name}: {text}")
            else:
                with self._lock:
                    self.num_in_flight -= 1
                    self.answers.append(answer)
