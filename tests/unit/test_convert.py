"""Messages to core types and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.types import Epoch, Incarnation, PromptLogprobs, SampledToken, Sampling, TokenLogprob
from kvrelay.proto import convert
from kvrelay.proto.v1 import handoff_pb2


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_token_ids_survive_packing(ids: list[int]) -> None:
    assert convert.unpack_ids(convert.pack_ids(ids)).tolist() == ids


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, ">i4"])
def test_ids_are_packed_alike_whatever_holds_them(dtype: str) -> None:
    ids = np.arange(1, 9, dtype=dtype)

    assert convert.pack_ids(ids) == bytes(byte for low in range(1, 9) for byte in (low, 0, 0, 0))
    assert convert.pack_ids(ids[::-2]) == convert.pack_ids([8, 6, 4, 2])


def test_ids_are_seen_where_they_lie_and_unpacked_where_they_can_be_changed() -> None:
    packed = convert.pack_ids([1, 2, 3])
    seen, unpacked = convert.view_ids(packed), convert.unpack_ids(packed)
    unpacked[0] = 7

    assert seen.tolist() == [1, 2, 3]
    assert not seen.flags.writeable
    assert not seen.flags.owndata


def test_wrong_packing_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="7 bytes"):
        convert.unpack_ids(b"1234567")
    with pytest.raises(InvalidRequestError, match=str(2**31)):
        convert.unpack_ids(np.array([2**31], dtype="<u4").tobytes())


@given(
    st.builds(
        Sampling,
        max_tokens=st.integers(0, 2**31),
        temperature=st.floats(0, 100),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(0, 1000),
        min_p=st.floats(0, 1),
        repetition_penalty=st.floats(0.1, 2),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        seed=st.integers(0, 2**64 - 1),
        stop_token_ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
        logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs=st.booleans(),
    )
)
def test_sampling_survives(sampling: Sampling) -> None:
    assert convert.sampling_from_pb(convert.sampling_to_pb(sampling)) == sampling


def test_identities_and_tokens_survive() -> None:
    epoch = Epoch(Incarnation("decode-1", 2**63 - 1), 7)
    token = SampledToken(5, TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.5))))

    assert convert.epoch_from_pb(convert.epoch_to_pb(epoch)) == epoch
    assert convert.sampled_from_pb(convert.sampled_to_pb(token)) == token
    scored = PromptLogprobs(1, (-0.5, -2.0))
    assert convert.prompt_logprobs_from_pb(convert.prompt_logprobs_to_pb(scored)) == scored
    assert convert.sampled_from_pb(convert.sampled_to_pb(SampledToken(3))) == SampledToken(3)


@given(st.floats(0, allow_nan=False))
def test_any_time_fits_the_field_of_a_message_and_is_never_none(seconds: float) -> None:
    ticket = handoff_pb2.Ticket(timeout_ms=convert.ms_to_pb(seconds))

    assert ticket.timeout_ms >= 1
    assert ticket.timeout_ms / 1e3 <= max(seconds, 1e-3)
