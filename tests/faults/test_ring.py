"""L1-L3: chunks, ring and layout. The values that ranks compute are compared in tests/contract/test_ring.py."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.cluster import wait_until
from faults.lab.fleet import Fleet
from faults.lab.requests import Watched, right
from faults.lab.workload import SPEC, prompt
from kvrelay.core.shard import Span
from kvrelay.kv_transfer import plan

CHUNK = SPEC.chunk_tokens or 128
PAGE = 64


@pytest.mark.sabotage("an_owner_is_lost")
@given(data=st.data(), ring_size=st.integers(1, 5), page_tokens=st.sampled_from([8, 64]))
@settings(max_examples=100, deadline=None)
def test_l1_the_ranges_of_all_ranks_are_every_token_once(data: st.DataObject, ring_size: int, page_tokens: int) -> None:
    """L1. Ring sizes, page sizes, chunk edges and prompt lengths."""
    length = data.draw(st.integers(1, 40 * page_tokens))
    start = data.draw(st.integers(0, length - 1))
    owners = data.draw(st.lists(st.integers(0, ring_size - 1), min_size=40, max_size=40))
    spans = [
        span
        for rank in range(ring_size)
        for span in plan.owned_ranges(Span(start, length), owners, rank=rank, page_tokens=page_tokens)
    ]
    assert sorted(token for span in spans for token in range(span.start, span.end)) == list(range(start, length))


@pytest.mark.parametrize(
    "num_tokens",
    [
        *(1, PAGE + 1, 2 * CHUNK + 1),
        *(
            pytest.param(n, marks=pytest.mark.full)
            for n in (2, PAGE - 1, PAGE, CHUNK - 1, CHUNK, CHUNK + 1, 1024, 1100)
        ),
    ],
)
@pytest.mark.sabotage("a_row_is_lost")
def test_l1_l2_prompts_around_every_boundary_get_the_tokens_of_one_rank(fleet: Fleet, num_tokens: int) -> None:
    """L1, L2. A last chunk of one token, a prompt shorter than the ring, through the ring of two."""
    fleet.serve_on("prefill-1")
    right(fleet, 600, num_tokens=num_tokens)
    right(fleet, 600, num_tokens=num_tokens + 30)  # its cached prefix ends inside a page


@pytest.mark.sabotage("committed_blocks_dropped")
def test_l3_what_an_interrupted_request_computed_is_not_computed_again(fleet: Fleet) -> None:
    """L3. Cancelled between two chunks; the next one begins where it was."""
    tokens = 8 * CHUNK
    fleet.serve_on("prefill-0")
    fleet.arm_all("prefill", "prefill.chunk", seconds=0.2)
    request = Watched(fleet, 610, num_tokens=tokens)
    wait_until(lambda: any(p.prefilled_tokens >= 3 * CHUNK for p in request.answer.progress), 10)
    computed = max(p.prefilled_tokens for p in request.answer.progress)
    request.call.cancel()
    request.end(5)
    fleet.remote.clear()
    fleet.assert_settled()
    fleet.serve_on("prefill-0")
    before = fleet.counter("prefill_tokens_executed", role="prefill")
    again = fleet.generate(prompt(610, tokens), max_tokens=4)
    assert again.usage.cached_tokens >= computed
    assert fleet.counter("prefill_tokens_executed", role="prefill") - before <= tokens - computed


@pytest.mark.sabotage("a_pause_forgets")
def test_l3_a_chunk_that_gives_way_to_short_prompts_goes_on_where_it_was(fleet: Fleet) -> None:
    """L3. Short prompts come while a long one is computed slowly by the ring of two; all get the right tokens."""
    # A node that knows its costs sees that slowed layers make all prompts alike; a new one goes by their tokens.
    restarts = fleet.local.said().count("prefill-1 restarted")
    fleet.signal("prefill-1", signal.SIGKILL)
    wait_until(lambda: fleet.local.said().count("prefill-1 restarted") > restarts, 60)
    fleet.make_whole(60)
    fleet.serve_on("prefill-1")
    fleet.arm_all("prefill", "prefill.layer", seconds=0.1)
    paused = fleet.counter("chunk_pauses_total", role="prefill")
    request = Watched(fleet, 620, num_tokens=6 * CHUNK)
    wait_until(lambda: bool(request.answer.progress), 10)
    for seed in range(621, 625):
        right(fleet, seed, num_tokens=9, output=1)
    fleet.remote.clear()
    request.assert_right()
    assert fleet.counter("chunk_pauses_total", role="prefill") > paused
