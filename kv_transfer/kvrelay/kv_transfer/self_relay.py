"""Before a node serves: one page relayed from its pool into its pool, by the transport that will relay for others."""

from __future__ import annotations

import secrets
import time

import torch

from kvrelay.core.clock import Clock, monotonic
from kvrelay.core.errors import TransferError
from kvrelay.kv_transfer.plan import Copy
from kvrelay.kv_transfer.transport import PENDING, Failed, Progress, Transport
from kvrelay.kvcache.checksum import pool_checksum
from kvrelay.kvcache.pool import LatentPool

_TIMEOUT_S = 20.0  # the first write also makes the connection
_POLL_S = 0.001


def prove_relay(transport: Transport, pool: LatentPool, *, clock: Clock = monotonic) -> str:
    """Write the first page of the first layer over the last page of the last one and compare; then zero both.

    Return over what it went, see `Transport.route`. Call it on the thread that owns the transport, before anything lies
    in the pool.

    Raises:
        TransferError: the write failed, took too long, was not announced, or other bytes landed.
    """
    layout, last = pool.layout, (pool.layout.num_layers - 1, pool.num_pages - 1)
    source, target = (
        layout.offset_bytes(layer=layer, page=page, row=0, num_pages=pool.num_pages) for layer, page in ((0, 0), last)
    )
    checksum, notice, name = pool_checksum(pool), secrets.token_bytes(16), transport.address().agent_name
    pages = pool.layer(0)[0], pool.layer(last[0])[last[1]]
    content = pages[0].view(torch.uint8)
    content.copy_(torch.randint(256, content.shape, dtype=torch.uint8))
    wanted = checksum([(source, layout.page_bytes)])
    transport.connect(transport.address())
    try:
        _write(
            transport, name, Copy(source, target, layout.page_bytes), notice, until_s=clock() + _TIMEOUT_S, clock=clock
        )
        if checksum([(target, layout.page_bytes)]) != wanted:
            raise TransferError(f"{name} relayed a page to itself and other bytes landed")
        return transport.route(name)
    finally:
        transport.disconnect(name)
        for page in pages:
            page.zero_()
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)  # or the zeros could land on what another stream writes


def _write(transport: Transport, name: str, copy: Copy, notice: bytes, *, until_s: float, clock: Clock) -> None:
    handle = transport.post(name, [copy], notice)
    progress: Progress = PENDING
    heard: list[tuple[str, bytes]] = []
    while progress is PENDING or not heard:
        if clock() >= until_s:
            raise TransferError(f"{name} could not relay a page to itself within {_TIMEOUT_S:g} s")
        if progress is PENDING:
            progress = transport.poll(handle)
            if isinstance(progress, Failed):
                raise TransferError(f"{name} could not relay a page to itself: {progress.reason}")
        heard += transport.notices()
        time.sleep(_POLL_S)
    transport.release(handle)
    if heard != [(name, notice)]:
        raise TransferError(f"{name} relayed a page to itself and heard {heard!r}")
