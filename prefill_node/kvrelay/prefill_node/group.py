"""The processes of one ring: how they start, find each other, talk, and leave together.

Latents travel over the mesh's `ring` dimension (Gloo on CPUs, NCCL on GPUs); control messages and the small header of
each exchange travel over a Gloo group of host tensors, as protobuf bytes or integers, never as pickles. Every wait is
bounded by the group timeout, so a ring with a lost or stopped rank leaves as a whole.

Shapes in this file: B rows of a block, Y elements of a stored row.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch lists them nowhere
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from kvrelay.core.errors import RingError
from kvrelay.prefill_node.settings import RankPlace, child_environment

_FIRST_BYTES = 4096  # a control message up to this size is one send
_LENGTH_BYTES = 8


class Leave(IntEnum):
    """Whether the ring leaves the chunk in work before its last layer."""

    NO = 0
    STOP = 1  # in this layer; what was computed is lost
    PAUSE = 2  # behind this layer (a ring of one: before it); the chunk goes on later


@dataclass(frozen=True, slots=True)
class Header:
    """What goes with a rank's own block round the ring, so that all ranks leave at the same layer."""

    step_id: int
    layer: int
    leave: Leave  # only rank 0's counts

    def pack(self) -> Tensor:
        return torch.tensor([self.step_id, self.layer, self.leave], dtype=torch.int64)

    @classmethod
    def unpack(cls, numbers: Tensor) -> Header:
        step_id, layer, leave = numbers.tolist()
        return cls(int(step_id), int(layer), Leave(int(leave)))


class Exchange:
    """One hop in progress: a block leaves for the next rank while another one comes in from the previous."""

    def __init__(self, works: list[dist.Work], header_in: Tensor | None) -> None:
        self._works = works
        self._header_in = header_in

    def wait(self) -> Header | None:
        """Wait for both directions; return the header that came along, if this hop carries one."""
        for work in self._works:
            work.wait()
        return None if self._header_in is None else Header.unpack(self._header_in)


class RingGroup:
    """The process groups of one rank; made by `form`. Used by the step thread only."""

    def __init__(self, *, rank: int, size: int, mesh: DeviceMesh, control: dist.ProcessGroup) -> None:
        self.rank = rank
        self.size = size
        self._ring = mesh.get_group("ring")
        self._control = control
        self._next, self._previous = (rank + 1) % size, (rank - 1) % size

    def post(self, block_BY: Tensor, incoming_BY: Tensor, header: Header | None) -> Exchange:
        """Start one hop. Empty blocks are not sent, since both sides know that they are empty."""
        ops = []
        if block_BY.shape[0]:
            ops.append(dist.P2POp(dist.isend, block_BY, self._next, self._ring))
        if incoming_BY.shape[0]:
            ops.append(dist.P2POp(dist.irecv, incoming_BY, self._previous, self._ring))
        works = dist.batch_isend_irecv(ops) if ops else []
        header_in = None
        if header is not None:
            header_in = torch.empty(3, dtype=torch.int64)
            works += [self._isend(header.pack(), self._next), self._irecv(header_in, self._previous)]
        return Exchange(works, header_in)

    def all_gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks, in rank order; every rank has as many."""
        gathered = rows.new_empty((self.size * rows.shape[0], *rows.shape[1:]))
        dist.all_gather(list(gathered.chunk(self.size)), rows.contiguous(), group=self._ring)
        return gathered

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Give part r to rank r; return what came from each rank, in rank order. `parts` is [R, ...], contiguous."""
        received = torch.empty_like(parts)
        ops = []
        for other in range(self.size):
            if other == self.rank:
                received[other].copy_(parts[other])
            else:
                ops.append(dist.P2POp(dist.isend, parts[other], other, self._ring))
                ops.append(dist.P2POp(dist.irecv, received[other], other, self._ring))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        return received

    def barrier(self) -> None:
        """Wait for all ranks, on the host."""
        dist.barrier(group=self._control)

    def broadcast(self, message: bytes) -> None:
        """Send one control message from rank 0 to all others."""
        for work in [work for rank in range(1, self.size) for work in self._send(message, rank)]:
            work.wait()

    def receive(self, source: int = 0) -> bytes:
        """Return the next control message of `source`; waits at most the group timeout."""
        first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        self._irecv(first, source).wait()
        num_bytes = int(first[:_LENGTH_BYTES].view(torch.int64).item())
        rest = torch.empty(max(num_bytes + _LENGTH_BYTES - _FIRST_BYTES, 0), dtype=torch.uint8)
        if rest.numel():
            self._irecv(rest, source).wait()
        return torch.cat([first, rest])[_LENGTH_BYTES : _LENGTH_BYTES + num_bytes].numpy().tobytes()

    def send_to_leader(self, message: bytes) -> None:
        for work in self._send(message, 0):
            work.wait()

    def gather(self) -> list[bytes]:
        """Return one control message of each other rank, in rank order. Rank 0 only."""
        return [self.receive(rank) for rank in range(1, self.size)]

    def _send(self, message: bytes, to: int) -> list[dist.Work]:
        framed = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        whole = torch.frombuffer(bytearray(framed.ljust(_FIRST_BYTES, b"\0")), dtype=torch.uint8)
        pieces = (whole[:_FIRST_BYTES], whole[_FIRST_BYTES:])
        return [self._isend(piece, to) for piece in pieces if piece.numel()]

    def _isend(self, tensor: Tensor, to: int) -> dist.Work:
        work = dist.isend(tensor, to, group=self._control)
        assert work is not None, "this process is not in the control group"
        return work

    def _irecv(self, tensor: Tensor, source: int) -> dist.Work:
        work = dist.irecv(tensor, source, group=self._control)
        assert work is not None, "this process is not in the control group"
        return work


def serve_store(*, ring_size: int, timeout_s: float) -> TCPStore:
    """Start the store at which the ranks of a ring on this host meet, on any free port. Rank 0 only."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore("127.0.0.1", 0, ring_size, is_master=True, timeout=timeout, wait_for_workers=False)


def spawn_ranks(argv: Sequence[str], *, ring_size: int, store_port: int) -> list[subprocess.Popen[bytes]]:
    """Start ranks 1..R-1 as processes of the same program. Call it on the main thread: they die with it."""
    command = [sys.executable, "-m", "kvrelay.prefill_node.rank_child", str(os.getpid()), *argv]
    return [
        subprocess.Popen(  # noqa: S603 - our own program
            command,
            env=child_environment(rank=rank, ring_size=ring_size, store_port=store_port),
            stdout=subprocess.DEVNULL,  # stdout carries rank 0's ready line only
        )
        for rank in range(1, ring_size)
    ]


def form(
    place: RankPlace, device: torch.device, *, store: Store | None, group_timeout_s: float, start_timeout_s: float
) -> RingGroup:
    """Meet the other ranks and return the groups; ranks may arrive up to `start_timeout_s` apart.

    Raises:
        RingError: a rank did not arrive in time.
    """
    try:
        if store is None:
            timeout = timedelta(seconds=start_timeout_s)
            store, _, _ = next(rendezvous("env://", place.rank, place.ring_size, timeout=timeout))
        store.set(f"arrived/{place.rank}", "1")
        store.wait([f"arrived/{rank}" for rank in range(place.ring_size)], timedelta(seconds=start_timeout_s))
        group_timeout = timedelta(seconds=group_timeout_s)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.ring_size, timeout=group_timeout
        )
        # Rows are ring positions, columns tensor-parallel ones; there is one column so far.
        ranks = [[rank] for rank in range(place.ring_size)]
        mesh = DeviceMesh(device.type, ranks, mesh_dim_names=("ring", "tp"))
        control = dist.new_group(backend="gloo", timeout=group_timeout)
    except RuntimeError as err:
        raise RingError(f"rank {place.rank} of {place.ring_size}: the ring did not form: {err}") from err
    assert control is not None, "every rank is in the control group"
    return RingGroup(rank=place.rank, size=place.ring_size, mesh=mesh, control=control)
