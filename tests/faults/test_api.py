"""A1-A4: what a client says, and what it is told. Garbage of all kinds is in test_input_safety.py (A2)."""

from __future__ import annotations

import math
import struct
import time

import grpc
import pytest

from cluster.cluster import a_request, status_of
from faults.lab.drive import best_of_three, refusal
from faults.lab.fleet import Fleet
from faults.lab.requests import right
from faults.lab.workload import VOCAB, golden, prompt


@pytest.mark.sabotage("one_id_for_all")
def test_a1_every_request_has_an_id_of_its_own_minted_by_the_server(fleet: Fleet) -> None:
    """A1. There is no way to choose one."""
    calls = [fleet.start(prompt(700, 50), max_tokens=4) for _ in range(16)]
    answers = fleet.finish_all(calls)
    assert len({answer.accepted.request_id for answer in answers}) == 16
    assert {tuple(answer.token_ids) for answer in answers} == {golden(700, 50, 4)}
    assert "request_id" not in a_request([1]).DESCRIPTOR.fields_by_name


@pytest.mark.parametrize(
    ("tokens", "sampling"),
    [
        ([], {}),
        ([VOCAB], {}),
        ([0xFFFFFFFF], {}),
        ([1], {"temperature": math.nan}),
        ([1], {"temperature": -1.0}),
        ([1], {"top_p": 0.0}),
        ([1], {"min_p": 2.0}),
        ([1], {"repetition_penalty": math.inf}),
        ([1], {"presence_penalty": -101.0}),
        ([1], {"stop_strings": ["x" * 300]}),
        ([1], {"logprobs": 21}),
    ],
)
@pytest.mark.sabotage("nothing_validated")
def test_a2_a_wrong_request_is_one_clear_error_and_nobody_else_notices(
    fleet: Fleet, tokens: list[int], sampling: dict[str, object]
) -> None:
    """A2. Refused by the router itself: nodes refuse what they cannot do, but never hear of this."""
    before = fleet.retries()
    code, text = refusal(lambda: fleet.start(tokens, **{"max_tokens": 4, **sampling}, timeout_s=10))
    assert code is grpc.StatusCode.INVALID_ARGUMENT, text
    assert text
    assert fleet.retries() == before
    right(fleet, 710, num_tokens=40)


@pytest.mark.sabotage("first_logprob_lost")
def test_a3_the_first_tokens_logprob_and_the_usage_survive_the_hand_off(fleet: Fleet) -> None:
    """A3. From the leg that knows them."""
    fleet.generate(prompt(720, 300), max_tokens=2)
    answer = fleet.generate(prompt(720, 300), max_tokens=6, logprobs=2)
    assert [one.token_id for one in answer.logprobs] == answer.token_ids
    assert all(one.logprob < 0 and len(one.top) == 2 for one in answer.logprobs)
    assert answer.usage.cached_tokens == 256
    assert answer.usage.prompt_tokens == 300
    assert answer.usage.completion_tokens == 6


@pytest.mark.sabotage("times_do_not_add_up")
def test_a4_the_parts_of_the_time_are_the_clients_waits(fleet: Fleet) -> None:
    """A4. Within 5% of the client's clock, and a few milliseconds for its own way."""
    fleet.arm_all("prefill", "prefill.chunk", seconds=0.1)

    def off(number: int) -> tuple[float, ...]:
        """Return by what multiple of what is allowed each of the two waits is off."""
        fleet.arm_all("decode", "decode.step", seconds=0.2, count=1)
        began_s = time.monotonic()
        answer = fleet.generate(prompt(730 + number, 500), max_tokens=3)
        first_ms, second_ms = (at_s * 1e3 for at_s in answer.token_times_s[:2])
        assert time.monotonic() - began_s > 0.5
        split = answer.finished.time
        to_first = (
            split.queue_ms + split.tokenize_ms + split.place_ms
            + split.reserve_ms + split.prefill_ms + split.delivery_ms
        )  # fmt: skip
        between = split.exposed_relay_ms + split.verify_ms + split.admit_ms + split.first_step_ms
        pairs = ((to_first, first_ms), (between, second_ms - first_ms))
        return tuple(abs(told - seen) / max(15, 0.05 * seen) for told, seen in pairs)

    best_of_three(off, (1.0, 1.0))


def test_a2_packed_ids_of_a_broken_length_and_a_message_over_the_limit(fleet: Fleet) -> None:
    """A2. No breakage: gRPC's own limit."""
    request = a_request([1])
    request.tokens.packed_ids = struct.pack("<5B", *range(5))
    with pytest.raises(grpc.RpcError) as broken:
        list(fleet.inference.Generate(request, timeout=5))
    assert status_of(broken.value)[0] is grpc.StatusCode.INVALID_ARGUMENT
    request.tokens.packed_ids = bytes(100 << 20)
    with pytest.raises(grpc.RpcError) as large:
        list(fleet.inference.Generate(request, timeout=20))
    assert status_of(large.value)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    right(fleet, 740, num_tokens=40)
