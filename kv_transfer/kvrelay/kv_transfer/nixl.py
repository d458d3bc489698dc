"""The data plane over NIXL 1.5 and UCX.

What this file relies on was measured with NIXL 1.5.1 over tcp, shm and cma on CPUs and over NVLink between two GPUs:
- Only the notification bound to a WRITE follows its data, so there is no other one here.
- A notification goes out when its poster next asks for the state of the write, so pollers must not be lazy.
- Releasing a handle, removing a peer or deregistering memory stops no write in flight. The pool is registered once and
  never deregistered: a target that unmaps memory a peer is writing to crashes.
- A write of 8 bytes by the same agent, DONE, says that what it posted before can no longer land.
- The progress thread burns a core per idle agent and is slower than polling each millisecond, so it is off.
- Only UCX's log says which transport a link uses.
- A dead peer raises instead of returning an error state; a stopped peer stays in progress for over a minute.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvrelay.core.errors import TransferError
from kvrelay.core.types import Counters
from kvrelay.kv_transfer.fence_cells import FenceMemory, Source
from kvrelay.kv_transfer.plan import Copy, CopyTable, table_of
from kvrelay.kv_transfer.transport import (
    CELL_BYTES,
    PENDING,
    Address,
    Done,
    Failed,
    Handle,
    Progress,
    Region,
    digest,
)
from kvrelay.kv_transfer.ucx_log import UcxLog, ucx_log

log = logging.getLogger(__name__)

NAME = "nixl"
_FEW_COPIES = 8  # NIXL takes these sooner as tuples than as an array


@dataclass(slots=True)
class _Write:
    """A handle of ours: NIXL's, and what it reads when it is a fence."""

    xfer: Any
    peer: str
    source: Source | None
    done: bool = False  # already when posted


class NixlTransport:
    """One NIXL agent over one pool and one memory of fences."""

    name = NAME

    def __init__(
        self,
        *,
        agent_name: str,
        pool: Region,
        pool_pages: int,
        fences: FenceMemory,
        counters: Counters,
        net_devices: str = "",
        tcp_port_range: str = "",
    ) -> None:
        """Create the agent and register all memory.

        Args:
            net_devices, tcp_port_range: for UCX, which otherwise listens on random ports of every interface, without
                authentication; empty = its choice.

        Raises:
            TransferError: NIXL cannot start or refuses the memory.
        """
        self._log = _configure_ucx(net_devices=net_devices, tcp_port_range=tcp_port_range)
        self._errors = nixl_errors()
        self._agent = _new_agent(agent_name, self._errors)
        self._pool, self._fences, self._counters = pool, fences, counters
        self._peers: dict[str, Address] = {}
        self._routes: dict[str, str] = {}
        self._choices_before: dict[str, int] = {}  # of UCX, when a peer was connected whose route is not known yet
        for region in (pool, fences.cells.region, fences.sources.region):
            kind = _kind(region)
            try:
                self._agent.register_memory([(region.address, region.num_bytes, _device(region), "")], kind)
            except self._errors as err:
                raise TransferError(f"NIXL cannot register {region.num_bytes} bytes of {kind}: {err!r}") from err
        metadata: bytes = self._agent.get_agent_metadata()
        self._address = Address(NAME, agent_name, metadata, digest(metadata), pool, pool_pages, fences.cells.region)

    def address(self) -> Address:
        return self._address

    def connect(self, address: Address) -> str:
        address.check(transport=NAME)
        known = self._peers.get(address.agent_name)
        if known == address:
            return address.agent_name
        if address.agent_name == self._address.agent_name:  # NIXL knows it, and refuses its metadata
            self._peers[address.agent_name] = address
            self._choices_before[address.agent_name] = 0  # it is chosen when the agent is made
            return address.agent_name
        if known is not None:
            self.disconnect(address.agent_name)  # NIXL refuses a name that it knows
        choices_before = len(self._log.choices())
        try:
            loaded: Any = self._agent.add_remote_agent(address.metadata)
        except self._errors as err:
            raise TransferError(f"NIXL refuses the metadata of {address.agent_name}: {err!r}") from err
        name = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        if name != address.agent_name:
            self._forget(name)
            raise TransferError(f"the metadata of {address.agent_name} belongs to {name}")
        self._peers[name], self._choices_before[name] = address, choices_before
        return name

    def route(self, peer: str) -> str:
        if peer not in self._routes and peer in self._choices_before:
            self._routes[peer] = self._find_route(peer)
        return self._routes.get(peer, "")

    def _find_route(self, peer: str) -> str:
        """Return what UCX chose since the peer was connected; if nothing, it is like an earlier peer.

        UCX names no peer, so when another one was connected meanwhile, or several before, it is one of theirs.
        """
        reaches = ("self",) if peer == self._address.agent_name else ("intra-node", "inter-node")
        ours = [
            choice.route if choice.reach in reaches and self._address.agent_name.startswith(choice.worker) else ""
            for choice in self._log.choices()
        ]
        new = [route for route in ours[self._choices_before.pop(peer) :] if route]
        if new and not self._choices_before:
            return new[-1]  # what it chose before was for the time until all lanes are connected
        return " or ".join(sorted({route for route in new or ours if route}))

    def scatters(self, peer: str) -> bool:
        return False

    def disconnect(self, peer: str) -> None:
        self._routes.pop(peer, None)
        self._choices_before.pop(peer, None)
        if self._peers.pop(peer, None) is not None and peer != self._address.agent_name:
            self._forget(peer)

    def _forget(self, peer: str) -> None:
        try:
            self._agent.remove_remote_agent(peer)
        except self._errors as err:
            log.warning("NIXL cannot forget %s: %r", peer, err)

    def post(self, peer: str, copies: Sequence[Copy], notice: bytes) -> Handle:
        there = self._peer(peer).pool
        table = table_of(copies)
        local, remote = _descriptors(self._pool, table, 0), _descriptors(there, table, 1)
        return self._start(peer, (_kind(self._pool), local), (_kind(there), remote), notice, None)

    def write_fence(self, peer: str, cell: int, value: int) -> Handle:
        there = self._peer(peer).fence
        sources = self._fences.sources
        source, here = sources.take(value), sources.region
        table = table_of([Copy(source * CELL_BYTES, cell * CELL_BYTES, CELL_BYTES)])
        local, remote = _descriptors(here, table, 0), _descriptors(there, table, 1)
        try:
            return self._start(peer, (_kind(here), local), (_kind(there), remote), b"", source)
        except TransferError:
            sources.give_back(source)
            raise

    def poll(self, handle: Handle) -> Progress:
        assert isinstance(handle, _Write)
        try:
            state = "DONE" if handle.done else self._agent.check_xfer_state(handle.xfer)
            if state == "PROC":
                return PENDING
            if state != "DONE":
                return self._failed(f"a write to {handle.peer} ended in state {state}")
            num_bytes = int(self._agent.get_xfer_telemetry(handle.xfer).totalBytes)
        except self._errors as err:
            return self._failed(f"a write to {handle.peer} failed: {err!r}")
        if handle.source is None:
            self._counters.add("nixl_bytes_total", num_bytes)
        return Done(num_bytes)

    def _failed(self, reason: str) -> Failed:
        self._log.choices()  # what UCX has to say of it becomes lines of our log
        return Failed(reason)

    def notices(self) -> list[tuple[str, bytes]]:
        try:
            new = self._agent.get_new_notifs()
        except self._errors as err:
            raise TransferError(f"NIXL cannot read what peers announced: {err!r}") from err
        return [(agent, notice) for agent, told in new.items() for notice in told]

    def release(self, handle: Handle) -> None:
        assert isinstance(handle, _Write)
        try:
            handle.xfer.release()
        except self._errors as err:
            log.warning("NIXL cannot release a write to %s: %r", handle.peer, err)
        if handle.source is not None:
            self._fences.sources.give_back(handle.source)

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)

    def _peer(self, peer: str) -> Address:
        if peer not in self._peers:
            raise TransferError(f"agent {peer} is not connected")
        return self._peers[peer]

    def _start(
        self, peer: str, local: tuple[str, Any], remote: tuple[str, Any], notice: bytes, source: Source | None
    ) -> _Write:
        agent = self._agent
        try:
            # Descriptors are integers of our own protocol; NIXL's serialised form is pickle and must not be read.
            here, there = agent.get_xfer_descs(local[1], local[0]), agent.get_xfer_descs(remote[1], remote[0])
            write = _Write(agent.initialize_xfer("WRITE", here, there, peer, notice), peer, source)
        except self._errors as err:
            raise TransferError(f"NIXL cannot prepare a write to {peer}: {err!r}") from err
        try:
            write.done = agent.transfer(write.xfer) == "DONE"
        except self._errors as err:
            # It may have been posted in part, so it is a handle that fails, not a post that never was.
            log.warning("posting to %s: %r", peer, err)
        return write


def _kind(region: Region) -> str:
    return "DRAM" if region.device_id < 0 else "VRAM"


def _device(region: Region) -> int:
    return max(region.device_id, 0)


def _descriptors(region: Region, table: CopyTable, side: int) -> Any:
    """Return NIXL's descriptors (address, bytes, device) of the sources, 0, or targets, 1, of copies."""
    if len(table) <= _FEW_COPIES:
        device = _device(region)
        return [(region.address + row[side], row[2], device) for row in table.tolist()]
    found = table.take((side, 2, 2), axis=1)
    found[:, 0] += region.address
    found[:, 2] = _device(region)
    return found.view(np.uint64)


def _configure_ucx(*, net_devices: str, tcp_port_range: str) -> UcxLog:
    """Set what UCX reads when it is loaded, by the next import of NIXL, and return its log."""
    if net_devices:
        os.environ["UCX_NET_DEVICES"] = net_devices
    if tcp_port_range:
        os.environ["UCX_TCP_PORT_RANGE"] = tcp_port_range
    return ucx_log()


def nixl_errors() -> tuple[type[Exception], ...]:
    """Return every exception that NIXL defines; they have no common base."""
    import nixl_cu13._bindings as bindings  # noqa: PLC0415 (a router has no NIXL)

    named = (getattr(bindings, name) for name in dir(bindings) if name.endswith("Error"))
    return tuple(kind for kind in named if isinstance(kind, type) and issubclass(kind, Exception))


def _new_agent(name: str, errors: tuple[type[Exception], ...]) -> Any:
    from nixl_cu13._api import nixl_agent, nixl_agent_config  # noqa: PLC0415

    # NIXL logs to stdout, which belongs to our ready line.
    nixl_log = logging.getLogger("nixl")
    nixl_log.handlers.clear()
    nixl_log.propagate = True
    nixl_log.setLevel(logging.WARNING)
    config = nixl_agent_config(enable_prog_thread=False, capture_telemetry=True, backends=["UCX"])
    expected: tuple[type[Exception], ...] = (*errors, RuntimeError, KeyError)
    try:
        return nixl_agent(name, config)
    except expected as err:
        raise TransferError(f"NIXL cannot start agent {name}: {err!r}") from err
