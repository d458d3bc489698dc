"""What a request needs of the rest of the router, as seams: nodes, channels to them, and who chooses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrelay.core.types import Incarnation
from kvrelay.index.reader import Confidence
from kvrelay.proto.v1 import decode_pb2_grpc, prefill_pb2_grpc
from kvrelay.router.admission import Terms
from kvrelay.router.prepared import Prepared


class Node(Protocol):
    """What this module needs to know of a node."""

    @property
    def incarnation(self) -> Incarnation: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def ring_size(self) -> int: ...
    @property
    def layout_fingerprint(self) -> bytes: ...
    @property
    def takes_late_tickets(self) -> bool: ...
    @property
    def takes_prepared_calls(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PullFrom:
    """From where the prefill node should fetch the prompt's first tokens, if it lacks them."""

    node: Node
    tokens: int


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Placed:
    """A decision of the placer. `release` takes the request's load off the placer's books; call it once."""

    prefill: Node
    decode: Node | None
    prefix_seed: bytes
    confidence: Confidence
    release: Callable[[], None]
    pull_from: PullFrom | None = None
    is_local: bool = False  # the decode node may compute what it lacks itself; `prefill` is for when it does not
    handed_over: Callable[[], None] = _nothing  # to be called when the decode node does not
    begun: Callable[[], None] = _nothing  # to be called when the prefill node computes, having fetched what it was to
    not_pulled: Callable[[], None] = _nothing  # to be called when the prefill node got nothing from `pull_from`


class Placer(Protocol):
    async def place(
        self,
        *,
        token_ids: npt.NDArray[np.int32],
        max_tokens: int,
        needs_decode: bool,
        avoid: frozenset[Incarnation],
        terms: Terms | None = None,
    ) -> Placed:
        """Choose nodes.

        Args:
            terms: what the request may be refused by; None = it has been let in before.

        Raises:
            UnavailableError: no node is left. OverloadedError: the terms cannot be kept.
        """
        ...


class Peers(Protocol):
    """Channels to nodes."""

    def prefill(self, node: Node) -> prefill_pb2_grpc.PrefillNodeAsyncStub: ...
    def decode(self, node: Node) -> decode_pb2_grpc.DecodeNodeAsyncStub: ...
    def prepared(self, node: Node) -> Prepared:
        """Return where a call to a prefill node may wait that takes such calls."""
        ...

    def put_aside(self, node: Incarnation, reason: str) -> None:
        """Place nothing on a node for a few seconds: it failed a call."""
        ...
