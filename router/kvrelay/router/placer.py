"""From a prompt to a pair of nodes: asks the index, adds what is on its way, lets placement decide, keeps the books."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

from kvrelay.core import prefix_hash
from kvrelay.core.types import Incarnation
from kvrelay.index.reader import Confidence, Match, PrefixReader
from kvrelay.router.books import Books, Entry
from kvrelay.router.fleet import FleetView, NodeView
from kvrelay.router.peers import Placed
from kvrelay.router.placement import Question, place
from kvrelay.router.tenants import calling

_log = logging.getLogger(__name__)
_SURENESS = (Confidence.EXACT, Confidence.DEGRADED, Confidence.FALLBACK)


class IndexPlacer:
    """Places requests over the fleet as it is now. Implements `peers.Placer`."""

    def __init__(self, fleet: FleetView, reader: PrefixReader, *, long_prompt_tokens: int) -> None:
        self._fleet = fleet
        self._reader = reader
        self._long_prompt_tokens = long_prompt_tokens
        self._books = Books()
        self._entries: dict[int, Entry] = {}  # by identity of the Placed that was given out

    async def place(
        self, *, token_ids: npt.NDArray[np.int32], max_tokens: int, needs_decode: bool, avoid: frozenset[Incarnation]
    ) -> Placed:
        """Choose nodes for a prompt.

        Raises:
            InvalidRequestError: no node could ever hold it.
            UnavailableError: no node can take it now.
        """
        nodes = self._fleet.nodes()
        hashes, cached, confidence = await self._cached(nodes, token_ids)
        question = Question(
            prompt_tokens=len(token_ids),
            total_tokens=len(token_ids) + max_tokens,
            needs_decode=needs_decode,
            long_prompt_tokens=self._long_prompt_tokens,
            cached_tokens=cached,
            loads=self._books.loads(),
            avoid=avoid,
        )
        pair = place(nodes, question)
        decode_pages = 0 if pair.decode is None else question.pages(pair.decode)
        entry = self._books.enter(pair, decode_pages=decode_pages, hashes=hashes[pair.prefill.layout_fingerprint])
        _log.debug(
            "placed on %s and %s, %d of %d tokens remain, index %s, left out: %s",
            pair.prefill.incarnation, pair.decode and pair.decode.incarnation, pair.remaining_tokens, len(token_ids),
            confidence.value, dict(pair.refused),
        )  # fmt: skip
        return self._given_out(Placed(pair.prefill, pair.decode, _seed(pair.prefill), confidence, entry.release), entry)

    def computed(self, placed: Placed) -> None:
        """Say that the prompt of a placed request is computed: it is no work ahead any more."""
        if (entry := self._entries.get(id(placed))) is not None:
            entry.computed()

    def _given_out(self, placed: Placed, entry: Entry) -> Placed:
        self._entries = {key: one for key, one in self._entries.items() if not one.is_released}
        self._entries[id(placed)] = entry
        return placed

    async def _cached(
        self, nodes: tuple[NodeView, ...], token_ids: npt.NDArray[np.int32]
    ) -> tuple[dict[bytes, list[bytes]], dict[Incarnation, int], Confidence]:
        """Return block hashes by layout, cached tokens by node, and how sure they are."""
        hashes: dict[bytes, list[bytes]] = {}
        cached: dict[Incarnation, int] = {}
        confidence = Confidence.EXACT
        for layout, node in {node.layout_fingerprint: node for node in nodes}.items():
            # In a thread: a million tokens take long enough to be felt by every other stream.
            hashes[layout] = await asyncio.to_thread(_hashes, node, token_ids)
            match = await self._reader.longest(hashes[layout])
            of_layout = {one.incarnation for one in nodes if one.layout_fingerprint == layout}
            confidence = max(confidence, _judged(match, of_layout), key=_SURENESS.index)
            blocks = {one.node: one.num_blocks for one in match.holdings}
            for holder, count in self._books.tentative_blocks(hashes[layout]).items():
                blocks[holder] = max(count, blocks.get(holder, 0))
            cached |= {one: count * node.block_tokens for one, count in blocks.items() if one in of_layout}
        return hashes, cached, confidence


def _seed(node: NodeView) -> bytes:
    return prefix_hash.seed(fingerprint=node.layout_fingerprint, tenant_salt=calling.get().salt)


def _hashes(node: NodeView, token_ids: npt.NDArray[np.int32]) -> list[bytes]:
    return prefix_hash.chain(_seed(node), token_ids, block_tokens=node.block_tokens)


def _judged(match: Match, nodes: AbstractSet[Incarnation]) -> Confidence:
    """Return how sure an answer is, given who is there: an index that does not know all nodes has lost something."""
    if match.confidence is Confidence.EXACT and nodes - {one.node for one in match.holdings}:
        return Confidence.DEGRADED
    return match.confidence
