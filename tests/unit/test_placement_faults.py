"""Faults of placement and index that other systems met, against the router's pure parts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from kvrelay.core import prefix_hash
from kvrelay.core.clock import ManualClock
from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.types import Incarnation, Role
from kvrelay.index.mirror_state import Change, Holder, MirrorState
from kvrelay.index.reader import Confidence
from kvrelay.router.books import Books
from kvrelay.router.decisions import Decision, DecisionLog, explained
from kvrelay.router.fleet import NodeView
from kvrelay.router.learned import Learned
from kvrelay.router.placement import Question, place
from kvrelay.router.tenants import Tenant

PAGE = 64
TOKENS = np.arange(4096 * PAGE, dtype=np.int32)


def a_node(name: str, role: Role, *, queued_tokens: int = 0, total_pages: int = 100_000) -> NodeView:
    return NodeView(
        incarnation=Incarnation(name, 1), role=role, endpoint="", ring_size=1, layout_fingerprint=b"f", model="m",
        dtype="float32", max_model_len=1_000_000, block_tokens=PAGE, page_tokens=PAGE, total_pages=total_pages,
        free_pages=total_pages, active_requests=0, queued_tokens=queued_tokens, draining=False,
    )  # fmt: skip


A, B, D = a_node("a", Role.PREFILL), a_node("b", Role.PREFILL), a_node("d", Role.DECODE)


def asked(prompt_tokens: int, cached: dict[str, int] | None = None) -> Question:
    return Question(
        prompt_tokens=prompt_tokens,
        total_tokens=prompt_tokens + 10,
        needs_decode=True,
        long_prompt_tokens=1024,
        cached_tokens={Incarnation(name, 1): tokens for name, tokens in (cached or {}).items()},
    )


def test_i3_block_hashes_are_the_same_under_every_hash_seed() -> None:
    code = (
        "import numpy as np\nfrom kvrelay.core import prefix_hash as p\n"
        "print(p.chain(p.seed(fingerprint=b'f'), np.arange(640, dtype=np.int32), block_tokens=64)[-1].hex())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }

    assert len(said) == 1


def test_i4_4096_cached_blocks_score_as_cached_and_a_tiny_prompt_is_placed() -> None:
    pair = place([A, B, D], asked(len(TOKENS), {"b": len(TOKENS)}))
    assert (pair.prefill.incarnation.name, pair.remaining_tokens) == ("b", PAGE)

    tiny = place([A, B, D], asked(3))
    assert tiny.remaining_tokens == 3


def test_i6_work_spills_from_one_overloaded_holder_and_no_other_affinity_suffers() -> None:
    overloaded = replace(A, queued_tokens=10_000_000)
    nodes = [overloaded, B, a_node("c", Role.PREFILL), D]

    spilled = place(nodes, asked(20_000, {"a": 19_968}))
    loyal = [place(nodes, asked(20_000, {name: 19_968})).prefill.incarnation.name for name in ("b", "c")]

    assert spilled.prefill.incarnation.name in ("b", "c")
    assert loyal == ["b", "c"]


def test_i7_what_the_router_remembers_of_requests_is_bounded() -> None:
    log = DecisionLog(max_decisions=100)
    books = Books(ManualClock())
    for at in range(2000):
        pair = place([A, B, D], asked(100))
        entry = books.enter(pair, decode_pages=2, hashes=[at.to_bytes(16, "big")])
        log.enter(f"r{at}", explained(pair, prompt_tokens=100, confidence=Confidence.EXACT, cached={}))
        entry.release()

    assert len(log) == 100
    assert isinstance(log.find("r1999"), Decision)
    assert log.find("r0") is None
    assert books.accounts == {}


def test_decisions_that_name_many_nodes_are_remembered_for_fewer_requests() -> None:
    log = DecisionLog(max_decisions=100, max_named=1000)
    for request in ("again", *(f"r{at}" for at in range(8)), "again"):
        log.enter(request, Decision(100, Confidence.EXACT, (), {f"n{at}": "is too small" for at in range(300)}))

    assert [log.find(request) is not None for request in ("r5", "r6", "r7", "again")] == [False, True, True, True]


def test_i8_two_tenants_with_one_prompt_share_no_block() -> None:
    chains = [
        prefix_hash.chain(
            prefix_hash.seed(fingerprint=b"f", tenant_salt=Tenant(name).salt), TOKENS[: 40 * PAGE], block_tokens=PAGE
        )
        for name in ("red", "blue")
    ]
    holder, mirror = Holder(A.incarnation, Role.PREFILL), MirrorState(max_blocks=1000)
    mirror.apply(Change(holder, 1, added=chains[0]))

    assert not set(chains[0]) & set(chains[1])
    assert mirror.longest(chains[0]) == {holder: 40}
    assert mirror.longest(chains[1]) == {holder: 0}


def test_o3_a_request_that_no_node_could_ever_hold_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidRequestError, match=r"needs 782 pages .* decode node has 10"):
        place([A, a_node("d", Role.DECODE, total_pages=10)], asked(50_000))


def test_a_decision_says_of_every_node_why_it_was_not_chosen() -> None:
    pair = place([A, replace(B, queued_tokens=5000), a_node("small", Role.DECODE, total_pages=1), D], asked(1000))

    decision = explained(pair, prompt_tokens=1000, confidence=Confidence.DEGRADED, cached={"b": 64})
    verdicts = {one.name: one.verdict for one in decision.candidates}

    assert (verdicts["a"], verdicts["d"]) == ("chosen", "chosen")
    assert verdicts["b"].startswith("costs 0.5 s more")
    assert decision.refused == {"small": "has 1 pages, the request needs 16"}


def test_a_node_that_proves_slow_gets_less() -> None:
    learned = Learned()
    for _ in range(5):
        learned.observe_prefill(A.incarnation, predicted_s=1.0, observed_s=4.0)
    nodes = learned.corrected([A, B, D])

    assert learned.is_proven(A.incarnation)
    assert not learned.is_proven(B.incarnation)
    assert place(nodes, asked(1000)).prefill.incarnation.name == "b"
    assert learned.corrected([B, D]) == (B, D)
    assert not learned.is_proven(A.incarnation)  # forgotten with the node
