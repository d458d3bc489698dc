"""F1-F6: both legs of a request share one fate, and another node takes over."""

from __future__ import annotations

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from cluster.cluster import status_of, wait_until
from faults.lab.drive import Stopwatch, best_of_three, drive, refusal
from faults.lab.fleet import Fleet
from faults.lab.requests import TOKENS, Watched, right
from faults.lab.workload import golden, prompt


@pytest.mark.sabotage("router_leaves_legs")
def test_f1_a_refusal_by_prefill_is_the_clients_in_half_a_second_and_decode_holds_nothing(fleet: Fleet) -> None:
    """F1."""
    fleet.arm_all("prefill", "prefill.accept", "invalid")

    def told_and_free_s(number: int) -> tuple[float, float]:
        watch = Stopwatch()
        code, text = refusal(lambda: fleet.start(prompt(200 + number, TOKENS), max_tokens=8))
        told_s = watch.s
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "refused by the fault lab" in text
        wait_until(lambda: not any(one.pinned_pages for one in fleet.stats().values()), 5.0)
        return told_s, watch.s

    best_of_three(told_and_free_s, (0.5, 1.0))


@pytest.mark.sabotage("failed_writes_unnoticed")
def test_f2_one_write_that_cannot_be_posted_fails_the_whole_at_once(fleet: Fleet) -> None:
    """F2. The request is redone, and waits for no timer."""
    golden(210, TOKENS, 12)
    said = len(fleet.log_of("router"))
    fleet.serve_on("prefill-0")
    fleet.arm("prefill-0", "part", "refuse", skip=3, count=1)
    watch = Stopwatch()
    right(fleet, 210)
    assert watch.s < 5.0
    # And not that a part never landed, which is what the timer says.
    assert re.search(r"attempt 1 failed: .*no such route", fleet.log_of("router")[said:])


@pytest.mark.sabotage("aborts_not_remembered")
def test_f3_a_cancelled_attempt_does_not_come_back_to_life(fleet: Fleet) -> None:
    """F3. The abort overtakes the reservation."""
    with drive(fleet, prompt(220, TOKENS)) as one:
        one.abort(one.decode)
        code, text = refusal(one.reserve)
        assert code is grpc.StatusCode.FAILED_PRECONDITION, text
        one.abort(one.prefill)
        assert one.decode_stats().active_requests == 0


@pytest.mark.sabotage("no_avoidance")
def test_f4_a_prefill_node_that_always_fails_is_left_for_another(fleet: Fleet) -> None:
    """F4. With none left the client hears UNAVAILABLE, and soon."""
    fleet.serve_on("prefill-0")
    fleet.arm("prefill-0", "prefill.accept", "unavailable")
    for seed in range(230, 233):
        right(fleet, seed)
    fleet.arm("prefill-1", "prefill.accept", "unavailable")
    watch = Stopwatch()
    code, text = refusal(lambda: fleet.start(prompt(234, TOKENS), max_tokens=8, timeout_s=30))
    assert code is grpc.StatusCode.UNAVAILABLE, text
    assert watch.s < 10.0


@pytest.mark.sabotage("retry_starts_over")
def test_f5_c8_a_stream_goes_on_with_the_next_token_when_decode_dies(fleet: Fleet) -> None:
    """F5, C8. Killed after ten tokens; the text is the one without the fault."""
    fleet.arm_all("decode", "decode.step", seconds=0.03)
    request = Watched(fleet, 240, output=40)
    wait_until(lambda: len(request.answer.token_ids) >= 10, 20)
    found = [name for name, one in fleet.stats().items() if name.startswith("decode") and one.active_requests]
    fleet.signal(found[0], signal.SIGKILL)
    request.assert_right()
    assert request.answer.usage.completion_tokens == 40
    fleet.make_whole(60)


@pytest.mark.full
@pytest.mark.parametrize("storm_s", [4.0, 30.0])
@pytest.mark.sabotage("router_leaves_legs")
def test_f6_after_a_storm_of_failures_everything_is_as_before(fleet: Fleet, storm_s: float) -> None:
    """F6. Half of the prefill calls fail; a failure holds nothing for longer than a second."""
    golden(250, 200, 8)

    def rate(seconds: float) -> float:
        until_s, done = time.monotonic() + seconds, 0
        with ThreadPoolExecutor(4) as pool:
            while time.monotonic() < until_s:
                done += sum(pool.map(lambda _: _answered(fleet), range(4)))
        return done / seconds

    calm = rate(2.0)
    for number, name in enumerate(("prefill-0", "prefill-1")):
        fleet.arm(name, "prefill.accept", "unavailable", share=0.5, seed=number)
    rate(storm_s)
    fleet.remote.clear()
    wait_until(lambda: not fleet.unsettled(), 1.0, fleet.what_is_wrong)
    time.sleep(4.0)  # nodes are set aside for three seconds
    assert rate(2.0) > 0.5 * calm


def _answered(fleet: Fleet) -> bool:
    try:
        answer = fleet.generate(prompt(250, 200), max_tokens=8, timeout_s=20)
    except grpc.RpcError as err:
        if status_of(err)[0] is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    if tuple(answer.token_ids) != golden(250, 200, 8):
        raise AssertionError("a wrong answer")
    return True
