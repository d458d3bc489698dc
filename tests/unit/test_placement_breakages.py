"""The tests of the lines I and O notice what they are for: each fails with a deliberate breakage of the product."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from kvrelay.bench import sim_policies
from kvrelay.core.errors import ServeError
from kvrelay.index.mirror_state import MirrorState
from kvrelay.router import placement, score
from kvrelay.router.books import Books
from kvrelay.router.decisions import DecisionLog
from kvrelay.router.tenants import Tenant
from repo import ROOT


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "unit" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def lives_are_one(patch: pytest.MonkeyPatch) -> None:
    """A node is its name, whatever life it is in."""
    plain = MirrorState.longest

    def longest(self: MirrorState, hashes: Sequence[bytes]) -> dict[Any, int]:
        found = plain(self, hashes)
        best: dict[str, int] = {}
        for holder, depth in found.items():
            best[holder.node.name] = max(depth, best.get(holder.node.name, 0))
        return {holder: best[holder.node.name] for holder in found}

    patch.setattr(MirrorState, "longest", longest)


def hashes_are_pythons(patch: pytest.MonkeyPatch) -> None:
    """Blocks are named by hash(), which is seeded anew in each process."""
    wrong = """import numpy as np
class p:
    def seed(fingerprint): return fingerprint
    def chain(seed, ids, block_tokens): return [str(hash(ids.tobytes())).encode()]
"""
    plain = subprocess.run

    def run(args: list[str], **options: Any) -> Any:
        return plain([*args[:2], wrong + args[2].split("\n")[-1]], **options)

    patch.setattr(subprocess, "run", run)


def cached_blocks_end_at_2048(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        score.Question, "usable", lambda self, node: min(2048 * 64, self.cached_tokens.get(node.incarnation, 0))
    )


def nothing_is_tentative(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Books, "tentative_blocks", lambda self, hashes: [])


def work_ahead_is_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(score, "wait_s", lambda *_: 0.0)


def decisions_are_kept_for_ever(patch: pytest.MonkeyPatch) -> None:
    plain = DecisionLog.__init__
    patch.setattr(DecisionLog, "__init__", lambda self, max_decisions=0: plain(self, 1 << 60))


def mirror_has_no_cap(patch: pytest.MonkeyPatch) -> None:
    plain = MirrorState.__init__
    patch.setattr(MirrorState, "__init__", lambda self, *, max_blocks: plain(self, max_blocks=1 << 60))


def tenants_have_no_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tenant, "salt", b"")


def everybody_is_let_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sim_policies, "judge", lambda *_, **__: None)


def too_large_is_unavailable(patch: pytest.MonkeyPatch) -> None:
    plain = placement.refusal
    patch.setattr(placement, "refusal", lambda node, question: plain(replace(node, total_pages=1 << 40), question))


BREAKAGES: list[tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("test_mirror_state", "test_i2_a_restarted_node_does_not_inherit_its_old_blocks", lives_are_one),
    ("test_placement_faults", "test_i3_block_hashes_are_the_same_under_every_hash_seed", hashes_are_pythons),
    (
        "test_placement_faults",
        "test_i4_4096_cached_blocks_score_as_cached_and_a_tiny_prompt_is_placed",
        cached_blocks_end_at_2048,
    ),
    (
        "test_simulated_fleet",
        "test_i5_a_burst_with_one_new_prefix_computes_it_once_and_shares_the_rest",
        nothing_is_tentative,
    ),
    (
        "test_placement_faults",
        "test_i6_work_spills_from_one_overloaded_holder_and_no_other_affinity_suffers",
        work_ahead_is_not_seen,
    ),
    (
        "test_placement_faults",
        "test_i7_what_the_router_remembers_of_requests_is_bounded",
        decisions_are_kept_for_ever,
    ),
    ("test_mirror_state", "test_i7_the_mirror_stays_under_its_cap_and_says_that_it_forgot", mirror_has_no_cap),
    ("test_placement_faults", "test_i8_two_tenants_with_one_prompt_share_no_block", tenants_have_no_salt),
    ("test_host_copies", "test_i8_tenants_share_no_block_in_host_memory", tenants_have_no_salt),
    (
        "test_simulated_fleet",
        "test_o1_at_three_times_capacity_goodput_stays_and_the_rest_is_refused",
        everybody_is_let_in,
    ),
    (
        "test_placement_faults",
        "test_o3_a_request_that_no_node_could_ever_hold_is_refused_with_the_numbers",
        too_large_is_unavailable,
    ),
]


@pytest.mark.parametrize(("file", "name", "breaks"), BREAKAGES, ids=[one[1].split("_")[1] for one in BREAKAGES])
def test_a_breakage_is_noticed(
    file: str, name: str, breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    test = getattr(module(file), name)
    breaks(monkeypatch)

    with pytest.raises((AssertionError, pytest.fail.Exception, ServeError)):
        test()
