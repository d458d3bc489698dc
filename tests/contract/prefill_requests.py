"""What the tests of a prefill node ask it, and what they read from its answers."""

from __future__ import annotations

import secrets
from functools import cache
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from grpc import aio

from contract.ring_ranks import Case, alone
from kvrelay.kv_transfer.values import Request
from kvrelay.proto.v1 import common_pb2, prefill_pb2
from oracle_data import FOLDER

MODEL = "v3_noaux"
CHUNK = 128


NEEDS_RECORDING = pytest.mark.skipif(
    not (FOLDER / MODEL / "oracle.npz").exists(), reason=f"recorded reference {MODEL} is not on this machine"
)


@cache
def recorded() -> dict[str, npt.NDArray[Any]]:
    with np.load(FOLDER / MODEL / "oracle.npz") as arrays:
        return dict(arrays)


def a_ref() -> common_pb2.RequestRef:
    return common_pb2.RequestRef(request_id=secrets.token_hex(6), attempt=1)


def request_of(ref: common_pb2.RequestRef) -> Request:
    return Request(ref.request_id, ref.attempt)


def some_prompt(num_tokens: int) -> list[int]:
    return [secrets.randbelow(250) for _ in range(num_tokens)]


def latents_of(prompt: list[int]) -> npt.NDArray[np.float32]:
    """Return [layers, tokens, W], computed by one rank in this process."""
    rows = alone(Case(FOLDER / MODEL, tuple(prompt), 4096)).rows
    layers = 1 + max(layer for layer, _ in rows)
    return np.stack([[rows[layer, one] for one in range(len(prompt))] for layer in range(layers)])


async def events_of(call: Any) -> list[prefill_pb2.PrefillEvent]:
    return [event async for event in call]


def kinds(events: list[prefill_pb2.PrefillEvent]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events]


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(aio.AioRpcError) as caught:
        await events_of(call)
    return caught.value.code(), caught.value.details() or ""
