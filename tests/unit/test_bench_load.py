"""Live load: what is sent, and how its outcome is judged."""

from __future__ import annotations

import pytest

from kvrelay.bench.live import Outcome, _gaps
from kvrelay.bench.load import is_in_time, summary
from kvrelay.bench.prompts import from_trace, made_up
from kvrelay.bench.trace import Arrival, Trace


def a_block(name: int) -> bytes:
    return name.to_bytes(16, "big")


def test_prompts_share_what_the_traces_blocks_share_and_fit_the_model() -> None:
    arrivals = (
        Arrival(0.0, 512 * 3, 50, (a_block(1), a_block(2), a_block(3))),
        Arrival(1.0, 512 * 3, 5, (a_block(1), a_block(2), a_block(9))),
        Arrival(2.0, 400, 5, ()),
    )
    prompts = from_trace(Trace("t", 512, arrivals), vocab_size=100, longest=800, most_output_tokens=32, seed=1)
    block = int(512 * (800 - 32) / (512 * 3))

    assert [len(one.token_ids) for one in prompts[:2]] == [768, 768]
    assert (prompts[0].token_ids[: 2 * block] == prompts[1].token_ids[: 2 * block]).all()
    assert (prompts[0].token_ids[2 * block :] != prompts[1].token_ids[2 * block :]).any()
    assert max(len(one.token_ids) + one.output_tokens for one in prompts) <= 800
    assert [one.output_tokens for one in prompts] == [32, 5, 5]
    assert all(one.token_ids.min() >= 0 and one.token_ids.max() < 100 for one in prompts)


def test_made_up_prompts_share_as_many_tokens_as_asked_for() -> None:
    one, other = made_up([0.0, 1.0], prompt_tokens=50, shared_tokens=20, output_tokens=4, vocab_size=10_000, seed=1)

    assert (one.token_ids[:20] == other.token_ids[:20]).all()
    assert (one.token_ids[20:] != other.token_ids[20:]).any()
    assert len(one.token_ids) == len(other.token_ids) == 50


def test_tokens_that_come_together_share_the_time() -> None:
    assert _gaps([1.0, 1.5, 2.5, 2.5]) == pytest.approx([0.5, 0.5, 0.5])
    assert _gaps([1.0]) == []


def test_only_what_kept_its_targets_is_goodput_and_refusals_are_counted() -> None:
    good = Outcome("OK", 1.0, (0.01,) * 300, 100, 50, "exact")
    late, stuttering = Outcome("OK", 9.0, (0.01,), 100, 0, "exact"), Outcome("OK", 1.0, (1.0,) * 5, 100, 0, "exact")
    refused = Outcome("UNAVAILABLE", retry_after_s=2.0)
    found = summary([good, late, stuttering, refused], took_s=10.0, ttft_s=2.0, tbt_s=0.05)

    assert is_in_time(good, ttft_s=2.0, tbt_s=0.05)
    assert (found["goodput_per_s"], found["in_time"]) == (0.1, 0.25)
    assert found["ended"] == {"OK": 3, "UNAVAILABLE": 1}
    assert found["refusals_with_hint"] == 1
    assert found["cached_share"] == pytest.approx(0.1667, abs=1e-3)
