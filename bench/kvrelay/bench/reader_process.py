"""A process with a pool that others write into, as a decode node's is: what a bench relays to."""

from __future__ import annotations

import math
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvrelay.core.errors import TransferError
from kvrelay.core.layout import PageLayout
from kvrelay.core.settings import load
from kvrelay.core.types import Incarnation
from kvrelay.kv_transfer.pool_agent import start_agent
from kvrelay.kv_transfer.transport import Address
from kvrelay.kvcache.pool import LatentPool
from kvrelay.prefill_node.settings import PrefillSettings

_START_S, _END_S = 120.0, 20.0
NUM_CELLS = 8


class ReaderProcess:
    """Owns the process; what it holds is zero until somebody writes there."""

    def __init__(self, layout: PageLayout, num_pages: int, device: torch.device) -> None:
        """Start it.

        Raises:
            TransferError: it does not start.
        """
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, layout, num_pages, str(device)), name="bench-reader", daemon=True
        )
        self._process.start()
        theirs.close()  # so that its death ends our wait
        self.num_pages = num_pages
        self.address: Address = self._answer("the address of its pool")

    def layer_sums(self, tokens: int) -> list[float]:
        """Return the sum in fp64 of the first `tokens` rows of each layer.

        Raises:
            TransferError: the process has ended, or takes too long.
        """
        sums: list[float] = self._answer("its sums", order=tokens)
        return sums

    def close(self) -> None:
        self._orders.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()

    def _answer(self, what: str, *, order: int | None = None) -> Any:
        try:
            if order is not None:
                self._orders.send(order)
            if self._orders.poll(_START_S):
                return self._orders.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as err:
            raise TransferError(f"the reading process ended before it sent {what}") from err
        raise TransferError(f"the reading process did not send {what} within {_START_S:g} s")


def layer_sums(pool: LatentPool, tokens: int) -> list[float]:
    """Return the sum in fp64 of the first `tokens` rows of each layer."""
    return [pool.rows(layer)[:tokens].sum(dtype=torch.float64).item() for layer in range(pool.layout.num_layers)]


def _serve(orders: Connection, layout: PageLayout, num_pages: int, device_name: str) -> None:
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    pool = LatentPool(layout, num_pages, device)
    settings = load(PrefillSettings, ["--model", "-"], prog="kvrelay bench")
    agent = start_agent(
        pool, settings, node=Incarnation.new("bench-reader"), rank=0, num_cells=NUM_CELLS, on_fatal=lambda: None
    )
    agent.transfer.drain(math.inf, lambda: None)  # polls although nobody announces what it will write
    try:
        orders.send(agent.transfer.address)
        while True:
            orders.send(layer_sums(pool, orders.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # nobody wants anything any more
    finally:
        agent.transfer.stop()
