"""What splitting a prompt over a ring may cost in precision: 1.2 times the error that one rank makes anyway.

Collected by tests/contract/test_ring_error.py on a CPU and by tests/gpu/test_ring_error.py on a device, where the ranks
are threads that share it: NCCL refuses two ranks on one GPU.

Shapes in this file: T tokens, N heads, K query/key width, V value width, B rows of a block, W latent row.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import Queue

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvrelay.bench.random_model import TINY, V2_LITE, random_model
from kvrelay.bench.ring_layer import RingLayer
from kvrelay.core.shard import Span
from kvrelay.prefill_node import ring_plan
from kvrelay.prefill_node.group import Header

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = replace(V2_LITE if DEVICE.type == "cuda" else TINY, num_layers=1)
TOKENS = 4096 if DEVICE.type == "cuda" else 512
MOST = 1.2


@dataclass
class Seats:
    """Where threads that play the ranks of one ring hand each other their blocks."""

    size: int
    queues: list[Queue[tuple[Tensor, Header | None]]] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.queues = [Queue() for _ in range(self.size)]
        self.barrier = threading.Barrier(self.size, timeout=60)


@dataclass
class PlayedGroup:
    """A RingGroup whose ranks are threads over one device and one stream, so that order on the host is order there."""

    rank: int
    seats: Seats

    @property
    def size(self) -> int:
        return self.seats.size

    def post(self, block_BW: Tensor, incoming_BW: Tensor, header: Header | None) -> PlayedExchange:
        self.seats.queues[(self.rank + 1) % self.size].put((block_BW, header))
        return PlayedExchange(self, incoming_BW)


@dataclass
class PlayedExchange:
    group: PlayedGroup
    incoming_BW: Tensor

    def wait(self) -> Header | None:
        seats = self.group.seats
        block_BW, header = seats.queues[self.group.rank].get(timeout=60)
        self.incoming_BW.copy_(block_BW)
        seats.barrier.wait()  # nobody fills a buffer again that another one has yet to copy
        return header


def exact(kv_up: Tensor, queries_TNK: Tensor, rows_TW: Tensor, scale: float) -> Tensor:
    """Return causal attention in fp64 over the same rounded inputs and weights."""
    heads, latent = CONFIG.num_heads, CONFIG.kv_lora_rank
    rows = rows_TW.double()
    up = F.linear(rows[:, :latent], kv_up.double()).view(-1, heads, CONFIG.nope_width + CONFIG.value_width)
    out = torch.empty(TOKENS, heads, CONFIG.value_width, dtype=torch.float64, device=rows.device)
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=rows.device).triu(1)
    for head in range(heads):
        k = torch.cat((up[:, head, : CONFIG.nope_width], rows[:, latent:]), -1)
        scores = (queries_TNK[:, head].double() * scale) @ k.T
        out[:, head] = scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ up[:, head, CONFIG.nope_width :]
    return out


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("size", [2, 3, 4])
@torch.inference_mode()
def test_a_ring_in_bf16_is_about_as_exact_as_one_rank(size: int) -> None:
    model = random_model(CONFIG, DEVICE, torch.bfloat16)
    seats = Seats(size)
    ranks = [RingLayer(model, PlayedGroup(rank, seats), TOKENS) for rank in range(size)]  # type: ignore[arg-type]
    assert ranks[0]._whole is not None
    kv_up = model.layers[0]._attention._weights.kv_up
    expected = exact(kv_up, *ranks[0]._whole, model.softmax_scale)

    def attend(rank: RingLayer) -> Tensor:
        with torch.inference_mode():  # of each thread
            return rank.way("latent")()

    with ThreadPoolExecutor(max_workers=size) as threads:
        parts = list(threads.map(attend, ranks))

    spans = ring_plan.rank_spans(Span(0, TOKENS), ring_size=size, align_tokens=64)
    whole = parts[0].new_empty(TOKENS, *parts[0].shape[1:])
    for part, one in zip(parts, spans, strict=True):
        whole[torch.from_numpy(ring_plan.positions_of(one)).to(DEVICE)] = part
    alone_error, ring_error = error(ranks[0].alone()(), expected), error(whole, expected)
    assert 0 < alone_error < 2e-2
    assert ring_error <= MOST * alone_error, f"{ring_error} of a ring of {size}, {alone_error} of one rank"
