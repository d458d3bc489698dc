"""What the other routers have placed, added up as columns that follow what each of them tells. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.core.types import Incarnation
from kvrelay.index.router_loads import Told
from kvrelay.proto import convert
from kvrelay.proto.v1.fleet_pb2 import NodeLoad
from kvrelay.router.load_columns import RECENT_S, LoadColumns


@dataclass(frozen=True, slots=True)
class _Entered:
    """What one router has on one node, as it was entered."""

    load: NodeLoad
    works: tuple[int, ...]  # see `LoadColumns.put`
    fetches: tuple[int, ...]  # see `LoadColumns.put_fetch`
    at_s: float


class OthersLoads:
    def __init__(self) -> None:
        self.columns = LoadColumns()
        self._entered: dict[str, dict[Incarnation, _Entered]] = {}  # by router

    @property
    def num_routers(self) -> int:
        return len(self._entered)

    def hear(self, told: Sequence[Told], now_s: float) -> None:
        """Take what every other router has told; one that is not among them is gone, and what it had with it."""
        self.columns.at(now_s)
        for router in self._entered.keys() - {one.router for one in told}:
            self._drop_all(router, now_s)
            del self._entered[router]
        if not told:
            self.columns = LoadColumns()
        for one in told:
            nodes = self._entered.setdefault(one.router, {})
            if one.is_whole:
                self._drop_all(one.router, now_s)
            for load in one.loads:
                node = convert.incarnation_from_pb(load.node)
                if (before := nodes.pop(node, None)) is not None:
                    self._drop(node, before, now_s)
                if load.requests or load.works_s or load.recent_s or load.fetch_tokens:
                    nodes[node] = self._enter(node, load, now_s)

    def _enter(self, node: Incarnation, load: NodeLoad, now_s: float) -> _Entered:
        self.columns.add(node, requests=load.requests, tokens=load.tokens, pages=load.pages, context=load.context)
        self.columns.worked(node, load.recent_s)
        works = tuple(self.columns.put(node, work_s) for work_s in load.works_s)
        fetches = tuple(self.columns.put_fetch(node, tokens) for tokens in load.fetch_tokens)
        return _Entered(load, works, fetches, now_s)

    def _drop(self, node: Incarnation, entered: _Entered, now_s: float) -> None:
        load = entered.load
        self.columns.add(node, requests=-load.requests, tokens=-load.tokens, pages=-load.pages, context=-load.context)
        self.columns.worked(node, -load.recent_s * math.exp((entered.at_s - now_s) / RECENT_S))
        for work in entered.works:
            self.columns.take(work)
        for fetch in entered.fetches:
            self.columns.take_fetch(node, fetch)

    def _drop_all(self, router: str, now_s: float) -> None:
        nodes = self._entered[router]
        for node, entered in nodes.items():
            self._drop(node, entered, now_s)
        nodes.clear()
