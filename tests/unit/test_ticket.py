"""A ticket comes through two other processes: what contradicts itself is refused, in words that fit into a reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvrelay.core.errors import InvalidRequestError, LayoutMismatchError
from kvrelay.core.layout import PageLayout
from kvrelay.core.types import Incarnation
from kvrelay.kv_transfer.ticket import check_layout, open_ticket
from kvrelay.proto.convert import incarnation_to_pb
from kvrelay.proto.v1 import handoff_pb2

LAYOUT = PageLayout(num_layers=2, latent_width=8, rope_width=4, dtype="float32", model_id="m", block_tokens=64)
WRITER = Incarnation("prefill", 9)
POOL_PAGES = 40_000
LONGEST_ERROR = 1000  # characters; a gRPC status has room for a few thousand


def a_ticket(pages: Sequence[int], *, prompt_tokens: int) -> handoff_pb2.Ticket:
    return handoff_pb2.Ticket(
        writer=incarnation_to_pb(WRITER),
        ring_size=1,
        pages=[handoff_pb2.PageRun(first_page=page, num_pages=1) for page in pages],
        prompt_tokens=prompt_tokens,
        layout_fingerprint=LAYOUT.fingerprint,
        address=handoff_pb2.TransportAddress(
            pool_pages=POOL_PAGES, pool_bytes=POOL_PAGES * LAYOUT.page_bytes_all_layers, device_id=-1
        ),
    )


def test_pages_are_listed_in_token_order() -> None:
    opened = open_ticket(a_ticket([7, 3, 4], prompt_tokens=130), writer=WRITER, rank=0, layout=LAYOUT)
    assert opened.pages == (7, 3, 4)


def test_a_ticket_for_pages_of_another_format_is_refused() -> None:
    ours = replace(LAYOUT, latent_format="fp8")

    with pytest.raises(LayoutMismatchError, match=ours.fingerprint.hex()):
        check_layout(a_ticket([7], prompt_tokens=10), ours)
    check_layout(a_ticket([7], prompt_tokens=10), LAYOUT)


@pytest.mark.parametrize(
    ("pages", "text"),
    [
        (range(0, 32_000, 2), "16000 pages for a prompt of 999999 tokens"),
        (range(10_000, 41_250, 2), "page 41248 of a pool of 40000 pages"),
    ],
)
def test_a_refusal_of_thousands_of_scattered_pages_is_short(pages: range, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text) as caught:
        open_ticket(a_ticket(pages, prompt_tokens=999_999), writer=WRITER, rank=0, layout=LAYOUT)
    assert len(str(caught.value)) < LONGEST_ERROR
