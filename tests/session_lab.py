"""Small reservations and what a test needs to drive their sessions."""

from __future__ import annotations

import copy
from typing import Any

from kvrelay.core.types import Epoch, Incarnation
from kvrelay.kv_transfer import session_events as ev
from kvrelay.kv_transfer.session import ReaderSession
from kvrelay.kv_transfer.values import Request, Reservation

WRITER = Incarnation("prefill", 7)
REQUEST = Request("r", 1)
TOKEN, FINGERPRINT = b"token", b"layout"
NUM_LAYERS = 3
DEADLINE_S, LEASE_S, FENCE_S = 100.0, 20.0, 10.0


def reservation(*, ring_size: int = 1, prompt_tokens: int = 8, resident_tokens: int = 0) -> Reservation:
    return Reservation(
        epoch=Epoch(Incarnation("decode", 1), 5),
        request=REQUEST,
        writer=WRITER,
        ring_size=ring_size,
        pages=tuple(range(-(-prompt_tokens // 8))),
        resident_tokens=resident_tokens,
        prompt_tokens=prompt_tokens,
        num_layers=NUM_LAYERS,
        row_bytes=10,
        fingerprint=FINGERPRINT,
        one_time_token=TOKEN,
    )


def attach(rank: int = 0) -> ev.Attach:
    return ev.Attach(rank, WRITER, REQUEST, TOKEN, FINGERPRINT)


def snapshot(session: ReaderSession) -> dict[str, Any]:
    """Return everything a session knows, comparable; its coverage by what it holds."""
    known = {**vars(session)}
    coverage = known.pop("_coverage")
    return copy.deepcopy({**known, "coverage": vars(coverage)})
