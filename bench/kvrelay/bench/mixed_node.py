"""A node that prefills and decodes on one device: what a split cluster is measured against.

It is made of the same parts as nodes are, loader, prefill step, pool and recorded decode steps, in one process and with
nothing in front of it; or served (served_node.py). A prompt is computed between two decode steps, whole or in chunks;
while a piece is in work the running requests wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvrelay.bench import order_process
from kvrelay.bench.gaps import Beside
from kvrelay.bench.served_node import Door, Tell
from kvrelay.bench.timed import Timed
from kvrelay.core.errors import ServeError
from kvrelay.core.types import SampledToken, Sampling
from kvrelay.decode_node.engine import DecodeEngine, SequenceState
from kvrelay.decode_node.scheduler import Sequence as Running
from kvrelay.decode_node.settings import DecodeSettings
from kvrelay.model.loaded import Loaded
from kvrelay.model.sampler import SamplerState, sample
from kvrelay.model.single import Session, SingleEngine

Ids = npt.NDArray[np.int64]
_WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, with nothing beside it."""

    prompt: Ids
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests that run, and prompts that come while they do."""

    contexts: Sequence[Ids]  # prompts of the running requests
    running_tokens: int  # room for what each of them generates
    prompts: Sequence[Ids]  # computed one after the other
    chunk_tokens: int | None  # of a prompt between two decode steps; None: all of it
    alone_s: float  # with the running requests only, before the first prompt


@dataclass(frozen=True, slots=True)
class Serve:
    """Be there for callers over gRPC, and say where; once."""


@dataclass(frozen=True, slots=True)
class AnswerCaller:
    """The next one."""


@dataclass(slots=True)
class _Request:
    session: Session
    row: Running
    state: SequenceState


class MixedNode:
    """Model, pool and both engines. One thread."""

    def __init__(self, settings: DecodeSettings, *, block_tokens: int) -> None:
        """
        Args:
            block_tokens: of a prompt that is computed at once: as long as a prefill node's chunks.
        """
        loaded = Loaded.load(settings)
        self._model, self._block_tokens = loaded.model, block_tokens
        self._single = SingleEngine(loaded.model, loaded.pool)
        self._decode = DecodeEngine(loaded.model, loaded.pool, max_batch=settings.max_batch)
        self._decode.warm_up()

    def answer(self, order: Answer, tell: Tell = lambda _: None) -> Timed:
        """Return when each token was there; `tell` is called with each at once."""
        began_s = time.perf_counter()
        request = self._open(order.prompt, order.num_tokens)
        self._prefill(request, order.prompt)
        ids, at_s = [request.row.last_token], [time.perf_counter() - began_s]
        tell(ids[-1])
        while len(ids) < order.num_tokens:
            at_s.append(self._step([request]) - began_s)
            ids.append(request.row.last_token)
            tell(ids[-1])
        self._single.close(request.session)
        return Timed(tuple(ids), tuple(at_s))

    def mix(self, order: Mix) -> Beside:
        """Return the time between the tokens of the running requests, alone and while prompts are computed.

        A prompt's own second token is computed with theirs, as in a cluster whose client asks for two.
        """
        running = [self._open(prompt, order.running_tokens) for prompt in order.contexts]
        for request, prompt in zip(running, order.contexts, strict=True):
            self._prefill(request, prompt)
        for _ in range(_WARM_UP_STEPS):
            began_s = self._step(running)
        alone_s = [began_s]
        while alone_s[-1] < began_s + order.alone_s:
            alone_s.append(self._step(running))
        beside_s, first_tokens_s = [alone_s[-1]], []
        for prompt in order.prompts:
            request = self._open(prompt, 2)
            if order.chunk_tokens is None:
                self._prefill(request, prompt)
            else:
                for piece_TD in self._single.chunks(request.session, prompt, order.chunk_tokens):
                    hidden_TD = piece_TD
                    beside_s.append(self._step(running))
                self._take_first_token(request, hidden_TD)
            first_tokens_s.append(time.perf_counter() - alone_s[-1])
            beside_s.append(self._step([*running, request]))
            self._single.close(request.session)
        for request in running:
            self._single.close(request.session)
        return Beside([alone_s] * len(running), [beside_s] * len(running), first_tokens_s)

    def _open(self, prompt: Ids, num_tokens: int) -> _Request:
        session = self._single.open(len(prompt) + num_tokens)
        state = SequenceState(session.pages, SamplerState(Sampling(max_tokens=num_tokens), prompt.astype(np.int32)))
        return _Request(session, Running(id(session), len(prompt), 0, num_tokens, frozenset()), state)

    def _prefill(self, request: _Request, prompt: Ids) -> None:
        """Compute a prompt and choose its first token."""
        self._take_first_token(request, [*self._single.chunks(request.session, prompt, self._block_tokens)][-1])

    def _take_first_token(self, request: _Request, hidden_TD: Tensor) -> None:
        logits_1V = self._model.logits(hidden_TD[-1:])
        (token,) = sample(logits_1V, [request.state.sampler], [request.row.position])
        request.row.last_token = _id_of(token)

    def _step(self, requests: Sequence[_Request]) -> float:
        """Give each request its next token; return when it was there."""
        tokens = self._decode.step([one.row for one in requests], [one.state for one in requests])
        now_s = time.perf_counter()
        for request, token in zip(requests, tokens, strict=True):
            request.row.position += 1
            request.row.last_token = _id_of(token)
        return now_s


def _id_of(token: SampledToken | ServeError) -> int:
    if isinstance(token, ServeError):
        raise token
    return token.token_id


def serve(settings: DecodeSettings, block_tokens: int) -> order_process.Obey:
    """Return what obeys all orders above, of a node that is made here."""
    node, door = MixedNode(settings, block_tokens=block_tokens), Door()

    def obey(order: Answer | Mix | Serve | AnswerCaller) -> Timed | Beside | str:
        match order:
            case Answer():
                return node.answer(order)
            case Mix():
                return node.mix(order)
            case Serve():
                return door.open()
            case AnswerCaller():
                call = door.next()
                return node.answer(Answer(call.prompt, call.num_tokens), call.tell)

    return obey
