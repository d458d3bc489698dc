"""Notices survive the way as they are, or are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.shard import Span
from kvrelay.core.types import Epoch, Incarnation
from kvrelay.kv_transfer.notice import NUM_BYTES, Notice, NoticeKey, decode, encode
from kvrelay.kv_transfer.values import Part, Request

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
notices = st.builds(
    Notice,
    st.builds(NoticeKey, u64, u64, u64, u32),
    st.integers(0, 63),
    st.builds(Part, u32, u32, st.builds(Span, u32, u32), u64),
)
A_NOTICE = Notice(NoticeKey(1, 2, 3, 4), 5, Part(6, 7, Span(8, 9), 10))


@given(notice=notices)
def test_a_notice_comes_back_as_it_was(notice: Notice) -> None:
    raw = encode(notice)

    assert len(raw) == NUM_BYTES
    assert decode(raw) == notice


@pytest.mark.parametrize("bit", range(NUM_BYTES * 8))
def test_a_flipped_bit_is_noticed(bit: int) -> None:
    raw = bytearray(encode(A_NOTICE))
    raw[bit // 8] ^= 1 << bit % 8

    with pytest.raises(InvalidRequestError):
        decode(bytes(raw))


@given(raw=st.binary(max_size=2 * NUM_BYTES))
def test_garbage_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode(raw)


def test_keys_differ_by_incarnation_epoch_request_and_attempt() -> None:
    here, restarted = Incarnation("d", 1), Incarnation("d", 2)
    keys = {
        NoticeKey.of(Epoch(node, counter), Request(name, attempt))
        for node in (here, restarted)
        for counter in (1, 2)
        for name in ("a", "b")
        for attempt in (1, 2)
    }

    assert len(keys) == 16
