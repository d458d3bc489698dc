"""However many distinct prompts come by, a router stays under its cap of memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What a router keeps of requests, fed by a process of its own, whose memory is then that of nothing else.
_FEED = """
import resource, sys
from dataclasses import replace
from kvrelay.core.types import Incarnation, Role
from kvrelay.index.mirror_state import Change, Holder, MirrorState
from kvrelay.index.reader import Confidence
from kvrelay.router.books import Books
from kvrelay.router.decisions import DecisionLog, explained
from kvrelay.router.fleet import NodeView
from kvrelay.router.placement import Question
from kvrelay.router.shortlist import Roster

def node(name, role):
    return NodeView(
        incarnation=Incarnation(name, 1), role=role, endpoint="", ring_size=1, layout_fingerprint=b"f", model="m",
        dtype="float32", max_model_len=1 << 20, block_tokens=64, page_tokens=64, total_pages=1 << 20,
        free_pages=1 << 20, active_requests=0, queued_tokens=0, draining=False,
    )

prompts, cap = int(sys.argv[1]), int(sys.argv[2])
nodes = [node(f"p{at}", Role.PREFILL) for at in range(4)] + [node("d", Role.DECODE)]
books, mirror, log, roster = Books(), MirrorState(max_blocks=cap), DecisionLog(), Roster(nodes)

def one(at):
    hashes = [at.to_bytes(8, "big") + bytes([block]) * 8 for block in range(4)]
    loads = books.loads()
    if at % 50 == 0:  # placing takes most of the time and keeps nothing
        question = Question(
            prompt_tokens=300, total_tokens=400, needs_decode=True, long_prompt_tokens=1024, loads=loads,
            cached_tokens={holder.node: 64 * depth for holder, depth in mirror.found(hashes)},
        )
        one.pair = roster.place(question, [loads])
    pair = replace(one.pair)
    entry = books.enter(pair, decode_pages=7, hashes=hashes)
    log.enter(f"r{at}", explained(pair, prompt_tokens=300, confidence=Confidence.EXACT, cached={}))
    mirror.apply(Change(Holder(pair.prefill.incarnation, Role.PREFILL), at + 1, added=hashes))
    entry.release()

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for at in range(prompts):
    one(at)
    if at == prompts // 4:
        quarter = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(quarter - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - quarter, mirror.num_blocks)
"""


@pytest.mark.parametrize(
    "prompts", [40_000, pytest.param(1_000_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_i7_a_million_distinct_prompts_leave_a_router_under_its_cap(prompts: int) -> None:
    cap = 1 << 15  # blocks, at about 200 B each; and 4,096 decisions of five nodes, at about 3 kB each
    done = subprocess.run(
        [sys.executable, "-c", _FEED, str(prompts), str(cap)], capture_output=True, text=True, check=True
    )
    first_kib, then_kib, blocks = map(int, done.stdout.split())

    assert blocks == cap
    assert first_kib < 32 << 10
    assert then_kib < 4 << 10  # nothing more is kept of three times as many prompts
