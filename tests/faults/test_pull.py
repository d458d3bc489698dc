"""A prefill node fetches cached tokens from another node of either role; when that fails it computes them, and nothing
is lost. The sources are a decode node, and a prefill ring of two.
"""

from __future__ import annotations

import re
import secrets
import signal
import threading
import time
from typing import Any

import grpc
import pytest

from cluster.cluster import wait_until
from faults.lab.drive import Drive, drive
from faults.lab.fleet import Fleet
from faults.lab.requests import TOKENS
from faults.lab.workload import golden, prompt
from kvrelay.proto.convert import pack_ids
from kvrelay.proto.v1 import decode_pb2, fleet_pb2, prefill_pb2

OUTPUT = 8
WHOLE_BLOCKS = TOKENS // 64 * 64  # of 600 tokens


def _answer(one: Drive, **changed: Any) -> tuple[list[int], prefill_pb2.PrefillStarted]:
    """Run a request to its end; return its tokens and what prefill said of its cache."""
    ticket = one.reserve()
    tokens: list[int] = []

    def read() -> None:
        call = one.decode.Decode(decode_pb2.DecodeRequest(request=one.ref, epoch=ticket.epoch), timeout=40)
        for event in call:
            tokens.extend(token.token_id for token in event.tokens.tokens)

    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.5):
            one.renew()

    threads = [threading.Thread(target=read), threading.Thread(target=renew)]
    for thread in threads:
        thread.start()
    try:
        events = list(one.start_prefill(ticket, **changed))
        threads[0].join(40)
    finally:
        over.set()
    first = next(event.first_token.token.token_id for event in events if event.HasField("first_token"))
    return [first, *tokens], next(event.started for event in events if event.HasField("started"))


def _known_to_others(fleet: Fleet, seed: int, *, first: str = "prefill-1") -> bytes:
    """Let `first` and decode-0 have a prompt that the other prefill node has not; return its tenant's seed."""
    tenant = secrets.token_bytes(16)
    with drive(fleet, prompt(seed, TOKENS), prefill=first, decode="decode-0", seed=tenant) as one:
        assert _answer(one)[0] == list(golden(seed, TOKENS, OUTPUT))
    return tenant


def _source(fleet: Fleet, name: str) -> prefill_pb2.PullFrom:
    node = next(one for one in fleet.nodes() if one.node.name == name)
    return prefill_pb2.PullFrom(node=node.node, endpoint=node.endpoint, tokens=TOKENS, ring_size=node.ring_size)


def _counters(fleet: Fleet, node: str) -> dict[str, float]:
    return dict(fleet.stats()[node].counters)


@pytest.mark.parametrize(("source", "seed"), [("decode-0", 700), ("prefill-1", 701)])
def test_a_pull_spares_the_computation_and_changes_no_token(fleet: Fleet, source: str, seed: int) -> None:
    tenant = _known_to_others(fleet, seed)
    before = _counters(fleet, "prefill-0")
    with drive(fleet, prompt(seed, TOKENS), decode="decode-1", seed=tenant) as one:
        tokens, started = _answer(one, pull_from=_source(fleet, source))

    assert tokens == list(golden(seed, TOKENS, OUTPUT))
    assert (started.cached_tokens, started.pulled_tokens) == (WHOLE_BLOCKS, WHOLE_BLOCKS)
    after = _counters(fleet, "prefill-0")
    assert after["pulled_tokens_total"] - before.get("pulled_tokens_total", 0.0) == WHOLE_BLOCKS
    executed = after["prefill_tokens_executed"] - before.get("prefill_tokens_executed", 0.0)
    assert executed == TOKENS - WHOLE_BLOCKS
    assert _counters(fleet, source)["pushed_tokens_total"] >= WHOLE_BLOCKS
    with drive(fleet, prompt(seed, TOKENS), decode="decode-1", seed=tenant) as again:  # it stays cached
        tokens, started = _answer(again)
    assert tokens == list(golden(seed, TOKENS, OUTPUT))
    assert (started.cached_tokens, started.pulled_tokens) == (WHOLE_BLOCKS, 0)


@pytest.mark.parametrize("kind", ["corrupt", "refuse", "drop"])
@pytest.mark.parametrize(("source", "seed"), [("decode-0", 710), ("prefill-1", 711)])
def test_a_pull_that_goes_wrong_is_computed_instead(fleet: Fleet, kind: str, source: str, seed: int) -> None:
    tenant = _known_to_others(fleet, seed)
    failed = _counters(fleet, "prefill-0").get("pulls_failed_total", 0.0)
    fleet.arm(source, "part", kind, count=1)
    with drive(fleet, prompt(seed, TOKENS), decode="decode-1", seed=tenant) as one:
        tokens, started = _answer(one, pull_from=_source(fleet, source))

    assert tokens == list(golden(seed, TOKENS, OUTPUT))
    assert (started.cached_tokens, started.pulled_tokens) == (0, 0)
    assert _counters(fleet, "prefill-0")["pulls_failed_total"] == failed + 1


@pytest.mark.parametrize("source", ["decode-0", "prefill-1"])
def test_a_source_that_has_forgotten_refuses_at_once(fleet: Fleet, source: str) -> None:
    began_s = time.monotonic()
    with drive(fleet, prompt(720, TOKENS), decode="decode-1") as one:
        tokens, started = _answer(one, pull_from=_source(fleet, source))

    assert tokens == list(golden(720, TOKENS, OUTPUT))
    assert started.pulled_tokens == 0
    assert time.monotonic() - began_s < 8.0


@pytest.mark.parametrize(
    ("source", "seed"), [("decode-0", 730), pytest.param("prefill-1", 731, marks=pytest.mark.full)]
)
def test_a_source_that_is_killed_during_a_pull_costs_no_answer_and_no_page(
    fleet: Fleet, source: str, seed: int
) -> None:
    tenant = _known_to_others(fleet, seed)
    pull_from, posted = _source(fleet, source), _counters(fleet, source).get("parts_posted_total", 0.0)
    fleet.arm(source, "part", "delay", skip=1, seconds=30)
    started: list[prefill_pb2.PrefillStarted] = []
    answers: list[list[int]] = []
    with drive(fleet, prompt(seed, TOKENS), decode="decode-1", seed=tenant) as one:

        def ask() -> None:
            tokens, said = _answer(one, pull_from=pull_from)
            answers.append(tokens)
            started.append(said)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: _counters(fleet, source).get("parts_posted_total", 0.0) > posted, 10)
        fleet.signal(source, signal.SIGKILL)
        asking.join(30)

    assert answers == [list(golden(seed, TOKENS, OUTPUT))]
    assert started[0].pulled_tokens == 0
    # Its pages wait for the proof that the dead node writes no more: its newer life is that.
    wait_until(lambda: not fleet.unsettled(), 40, fleet.what_is_wrong)


@pytest.mark.parametrize(("source", "seed"), [("decode-0", 740), ("prefill-1", 741)])
def test_an_abort_during_a_pull_ends_the_request_and_gives_all_pages_back(fleet: Fleet, source: str, seed: int) -> None:
    tenant = _known_to_others(fleet, seed)
    pushes = _counters(fleet, source).get("pushes_total", 0.0)
    fleet.arm(source, "part", "slow", seconds=0.5)  # posting takes as long, for each layer
    with drive(fleet, prompt(seed, TOKENS), decode="decode-1", seed=tenant) as one:
        call = one.start_prefill(one.reserve(), pull_from=_source(fleet, source))
        wait_until(lambda: _counters(fleet, source).get("pushes_total", 0.0) > pushes, 10)
        assert one.abort(one.prefill)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        one.abort(one.decode)

    assert caught.value.code() is grpc.StatusCode.CANCELLED
    wait_until(lambda: not fleet.unsettled(), 20, fleet.what_is_wrong)


def test_placement_has_a_prefix_fetched_that_only_another_prefill_node_holds_or_says_that_computing_is_faster(
    fleet: Fleet,
) -> None:
    tokens = prompt(750, TOKENS)
    fleet.serve_on("prefill-1", count=1)
    fleet.generate(tokens, max_tokens=1)  # leaves nothing on a decode node
    before = _counters(fleet, "prefill-0").get("pulled_tokens_total", 0.0)
    pages = fleet_pb2.PreviewRequest(packed_ids=pack_ids(tokens), max_tokens=OUTPUT)
    wait_until(lambda: {one.cached_tokens for one in fleet.fleet.Preview(pages).candidates} == {0, WHOLE_BLOCKS}, 10)

    fleet.serve_on("prefill-0", "decode-1", count=1)
    answer = fleet.generate(tokens, max_tokens=OUTPUT)

    assert tuple(answer.token_ids) == golden(750, TOKENS, OUTPUT)
    why = fleet.fleet.Explain(fleet_pb2.ExplainRequest(request_id=answer.accepted.request_id))
    times = re.search(r"from prefill-1 would take (\S+) s, computing them (\S+) s", why.way)
    if times is not None:  # what faults before this test did to the link's measured speed decides
        assert float(times[1]) >= float(times[2])
        assert answer.usage.cached_tokens == 0
        return
    assert answer.usage.cached_tokens == WHOLE_BLOCKS
    assert _counters(fleet, "prefill-0")["pulled_tokens_total"] - before == WHOLE_BLOCKS
    assert f"pull from prefill-1 {WHOLE_BLOCKS} tokens" in why.way
    parts = next(one.parts_s for one in why.candidates if one.node == "prefill-0")
    assert 0.0 < parts["fetch_s"] < parts["compute_s"] + parts["fetch_s"]


@pytest.mark.parametrize(("kind", "seed"), [("", 760), ("corrupt", 761), ("drop", 762)])
def test_a_ring_fetches_too_and_computes_what_goes_wrong(fleet: Fleet, kind: str, seed: int) -> None:
    tenant = _known_to_others(fleet, seed, first="prefill-0")
    if kind:
        fleet.arm("prefill-0", "part", kind, skip=1, count=1)  # of the parts that go to either rank
    with drive(fleet, prompt(seed, TOKENS), prefill="prefill-1", decode="decode-1", seed=tenant) as one:
        tokens, started = _answer(one, pull_from=_source(fleet, "prefill-0"))

    assert tokens == list(golden(seed, TOKENS, OUTPUT))
    assert started.pulled_tokens == (0 if kind else WHOLE_BLOCKS)


@pytest.mark.full
def test_a_source_that_is_killed_while_a_ring_fetches_costs_no_answer_and_no_page_of_any_rank(fleet: Fleet) -> None:
    tenant = _known_to_others(fleet, 770, first="prefill-0")
    pull_from, posted = _source(fleet, "decode-0"), _counters(fleet, "decode-0").get("parts_posted_total", 0.0)
    fleet.arm("decode-0", "part", "delay", skip=1, seconds=30)
    answers: list[list[int]] = []
    with drive(fleet, prompt(770, TOKENS), prefill="prefill-1", decode="decode-1", seed=tenant) as one:
        asking = threading.Thread(target=lambda: answers.append(_answer(one, pull_from=pull_from)[0]))
        asking.start()
        wait_until(lambda: _counters(fleet, "decode-0").get("parts_posted_total", 0.0) > posted, 10)
        fleet.signal("decode-0", signal.SIGKILL)
        asking.join(30)

    assert answers == [list(golden(770, TOKENS, OUTPUT))]
    wait_until(lambda: not fleet.unsettled(), 40, fleet.what_is_wrong)
