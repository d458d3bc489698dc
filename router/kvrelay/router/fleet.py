"""The nodes as this router sees them: read from the registry, kept when it is unreachable, set aside when they fail."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.errors import UnavailableError
from kvrelay.core.supervise import keep
from kvrelay.core.types import Incarnation, Role
from kvrelay.index.registry import LEASE_S, NodeRegistry
from kvrelay.proto import convert
from kvrelay.proto.server import connect
from kvrelay.proto.tls import Tls
from kvrelay.proto.v1 import decode_pb2_grpc, fleet_pb2, prefill_pb2_grpc
from kvrelay.router.cost import DEFAULT_COST, NodeCost, published_cost
from kvrelay.router.lines import Lines
from kvrelay.router.peers import Node
from kvrelay.router.placement import Service
from kvrelay.router.prepared import Prepared
from kvrelay.router.usual import NO_LINKS, UsualLinks, with_usual_costs

log = logging.getLogger(__name__)

_MOST_LEFT = 4096  # names of nodes that have left and are remembered
ROLE_TO_PB = {Role.PREFILL: fleet_pb2.NODE_ROLE_PREFILL, Role.DECODE: fleet_pb2.NODE_ROLE_DECODE}
_ROLES = {number: role for role, number in ROLE_TO_PB.items()}


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node's record at its last heartbeat."""

    incarnation: Incarnation
    role: Role
    endpoint: str
    ring_size: int
    layout_fingerprint: bytes
    model: str
    dtype: str
    max_model_len: int
    block_tokens: int
    page_tokens: int
    total_pages: int
    free_pages: int
    active_requests: int
    queued_tokens: int
    draining: bool
    cost: NodeCost = DEFAULT_COST
    links: Mapping[str, float] = field(default_factory=dict)  # time per relayed token, by name of the decode node
    other_link_s: float = 0.0  # that of a link which is not among these, 0 = not known
    local_tokens: int = 0  # most prompt tokens that a decode node computes itself
    max_batch: int = 0  # most sequences of a decode step, 0 = not said
    host_token_s: float = 0.0  # to load a token from a prefill node's host memory; 0 = not measured
    pulls: bool = False  # a prefill node that can fetch cached blocks from other nodes
    takes_late_tickets: bool = False  # a prefill node that begins a prompt before its ticket is there
    takes_prepared_calls: bool = False  # a prefill node to which a call may be open before there is a request
    chunk_tokens: int = 0  # most prompt tokens of one step of a prefill node; 0 = not said
    latent_format: str = ""  # empty = not said


def view_of(record: fleet_pb2.NodeRecord, usual_links: UsualLinks = NO_LINKS) -> NodeView | None:
    """Return a record as a view, or None when its role is one that this router does not know.

    Args:
        usual_links: what links that were not used for long are taken to have become like.
    """
    role = _ROLES.get(record.role)
    if role is None:
        return None
    return NodeView(
        incarnation=convert.incarnation_from_pb(record.node),
        role=role,
        endpoint=record.endpoint,
        ring_size=record.ring_size,
        layout_fingerprint=record.layout_fingerprint,
        model=record.model,
        dtype=record.dtype,
        max_model_len=record.max_model_len,
        block_tokens=record.block_tokens,
        page_tokens=record.page_tokens,
        total_pages=record.total_pages,
        free_pages=record.free_pages,
        active_requests=record.active_requests,
        queued_tokens=record.queued_tokens,
        draining=record.draining,
        cost=published_cost(record),
        local_tokens=record.local_tokens,
        max_batch=record.max_batch,
        host_token_s=record.host_token_s,
        pulls=record.pulls,
        takes_late_tickets=record.takes_late_tickets,
        takes_prepared_calls=record.takes_prepared_calls,
        links={link.peer: usual_links.believed_s(link) for link in record.links if link.token_s > 0.0},
        other_link_s=record.other_link_token_s,
        chunk_tokens=record.chunk_tokens,
        latent_format=record.latent_format,
    )


class FleetView:
    """Refreshes itself once started; everything runs on one event loop. Implements `peers.Peers`."""

    def __init__(
        self,
        registry: NodeRegistry,
        *,
        refresh_s: float,
        put_aside_s: float,
        max_message_bytes: int,
        max_request_s: float,
        tls: Tls | None = None,
        on_change: Callable[[], None] = lambda: None,
        clock: Clock = monotonic,
    ) -> None:
        """`on_change` is called on the event loop after each refresh."""
        self._registry = registry
        self._refresh_s = refresh_s
        self._put_aside_s = put_aside_s
        self._on_change = on_change
        self._clock = clock
        self._records: list[fleet_pb2.NodeRecord] = []
        self._nodes: dict[Incarnation, NodeView] = {}
        self._told_to_leave: set[Incarnation] = set()
        self._left: OrderedDict[str, None] = OrderedDict()  # names, the last ones that left
        self._aside_until_s: dict[Incarnation, float] = {}
        self._usable: tuple[NodeView, ...] | None = None  # what `nodes` returns, until ...
        self._usable_until_s = 0.0  # ... a node is not aside any more
        self._service: tuple[tuple[NodeView, ...], Service] | None = None  # of the nodes at its left
        to_node = partial(connect, max_message_bytes=max_message_bytes, tls=tls)
        self._lines = Lines(to_node, max_request_s=max_request_s, clock=clock)
        self._task: asyncio.Task[None] | None = None
        self._life = b""  # of the registry's content; empty before there was any
        self._lost: list[fleet_pb2.NodeRecord] = []  # nodes that the registry has lost and that may not be back yet
        self._lost_until_s = 0.0
        self.registry_reachable = False
        self.usual_link_s = 0.0  # see `UsualLinks.token_s`

    async def start(self) -> None:
        await self.refresh()
        self._task = keep(self._keep_refreshing(), name="fleet view")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._lines.close()

    def nodes(self) -> tuple[NodeView, ...]:
        """Return the nodes on which something may be placed: registered, not draining, not set aside.

        As long as nothing about them has changed it is the same tuple.
        """
        now_s = self._clock()
        if self._usable is None or now_s >= self._usable_until_s:
            self._usable = tuple(
                node
                for name, node in self._nodes.items()
                if not node.draining and self._aside_until_s.get(name, 0.0) <= now_s
            )
            ends_s = (until_s for until_s in self._aside_until_s.values() if until_s > now_s)
            self._usable_until_s = min(ends_s, default=math.inf)
        return self._usable

    def service(self) -> Service:
        """Return what these nodes can do together."""
        nodes = self.nodes()
        if self._service is None or self._service[0] is not nodes:
            self._service = nodes, Service.of(nodes)
        return self._service[1]

    def records(self) -> list[fleet_pb2.NodeRecord]:
        """Return every registered node as it describes itself."""
        return list(self._records)

    def alive(self, node: Incarnation) -> bool:
        return node in self._nodes

    def find(self, name: str) -> NodeView | None:
        """Return the newest life of a node."""
        return next((node for node in self._nodes.values() if node.incarnation.name == name), None)

    def has_left(self, name: str) -> bool:
        """Return whether a node of this name was here and left; long ago, it may be forgotten."""
        return name in self._left

    def prefill(self, node: Node) -> prefill_pb2_grpc.PrefillNodeAsyncStub:
        return self._lines.to(node.endpoint).prefill

    def prepared(self, node: Node) -> Prepared:
        return self._lines.to(node.endpoint).prepared

    def decode(self, node: Node) -> decode_pb2_grpc.DecodeNodeAsyncStub:
        return self._lines.to(node.endpoint).decode

    def put_aside(self, node: Incarnation, reason: str) -> None:
        log.warning("node %s is set aside for %g s: %s", node, self._put_aside_s, reason)
        self._aside_until_s[node] = self._clock() + self._put_aside_s
        self._usable = None

    def mark_draining(self, node: Incarnation) -> None:
        """Place nothing more on a node, ahead of its own next heartbeat."""
        if node in self._nodes:
            self._told_to_leave.add(node)
            self._nodes[node] = replace(self._nodes[node], draining=True)
            self._usable = None

    async def refresh(self) -> None:
        """Read the registry once; when it does not answer, the nodes known so far stay."""
        try:
            records = await self._registry.nodes()
        except UnavailableError as err:
            if self.registry_reachable:
                log.warning("the registry is unreachable, keeping %d known nodes: %s", len(self._nodes), err)
            self.registry_reachable = False
            return
        if not self.registry_reachable:
            log.info("the registry answers: %d nodes", len(records))
        self.registry_reachable = True
        self._take(self._with_lost(records))

    def _with_lost(self, records: list[fleet_pb2.NodeRecord]) -> list[fleet_pb2.NodeRecord]:
        """Return the records, and when the registry's server has lost all it had, also those that are not back yet.

        A node enters itself again with its next heartbeat; meanwhile it serves. One that ended just then fails calls,
        and is put aside.
        """
        if self._life and self._life != self._registry.life:
            log.warning("the registry has lost its %d nodes, keeping them until they are back", len(self._records))
            self._lost, self._lost_until_s = list(self._records), self._clock() + LEASE_S
        self._life = self._registry.life
        if self._clock() >= self._lost_until_s:
            self._lost = []
        back = {record.node.name for record in records}
        return [*records, *(record for record in self._lost if record.node.name not in back)]

    def _take(self, records: list[fleet_pb2.NodeRecord]) -> None:
        links = UsualLinks.of(records)
        views = (view_of(record, links) for record in records)
        nodes = with_usual_costs([node for node in views if node is not None])
        self._note_changes({node.incarnation: node for node in nodes})
        self._records = records
        self._told_to_leave &= {node.incarnation for node in nodes}
        self._nodes = {
            node.incarnation: replace(node, draining=node.draining or node.incarnation in self._told_to_leave)
            for node in nodes
        }
        self._usable = None
        self.usual_link_s = links.token_s
        self._aside_until_s = {name: until for name, until in self._aside_until_s.items() if name in self._nodes}
        self._lines.keep({node.endpoint for node in nodes})
        self._on_change()

    def _note_changes(self, nodes: dict[Incarnation, NodeView]) -> None:
        for node in nodes.keys() - self._nodes.keys():
            log.info("node %s joined: %s, ring of %d", node, nodes[node].role.value, nodes[node].ring_size)
        for node in self._nodes.keys() - nodes.keys():
            log.info("node %s left", node)
            self._left[node.name] = None
            self._left.move_to_end(node.name)
            if len(self._left) > _MOST_LEFT:
                self._left.popitem(last=False)

    async def _keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            await self.refresh()
            await self._lines.close_retired()
