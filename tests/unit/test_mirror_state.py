"""The copy of the index in memory: what it knows, and that it knows what it does not know."""

from __future__ import annotations

import random

from kvrelay.core.types import Incarnation, Role
from kvrelay.index.mirror_state import Change, Holder, MirrorState

A, B = Holder(Incarnation("a", 1), Role.PREFILL), Holder(Incarnation("b", 2), Role.DECODE)
BLOCKS = [at.to_bytes(16, "big") for at in range(40)]


def a_mirror(*changes: Change, max_blocks: int = 1000) -> MirrorState:
    mirror = MirrorState(max_blocks=max_blocks)
    for change in changes:
        mirror.apply(change)
    return mirror


def test_the_longest_prefix_is_told_per_holder() -> None:
    mirror = a_mirror(Change(A, 1, added=BLOCKS[:30]), Change(B, 1, added=BLOCKS[:1]))

    assert mirror.longest(BLOCKS) == {A: 30, B: 1}
    assert mirror.longest(BLOCKS[:5]) == {A: 5, B: 1}
    assert mirror.longest([]) == {A: 0, B: 0}
    assert mirror.incomplete() == ()


def test_a_prefix_ends_at_the_first_block_that_a_complete_holder_lacks() -> None:
    mirror = a_mirror(Change(A, 1, added=BLOCKS), Change(A, 2, removed=[BLOCKS[7]]))

    assert mirror.longest(BLOCKS) == {A: 7}


def test_a_skipped_number_is_noticed_until_the_next_snapshot() -> None:
    mirror = a_mirror(Change(A, 1, added=BLOCKS[:5]), Change(A, 3, added=BLOCKS[10:20]))
    assert mirror.incomplete() == (A,)
    assert mirror.longest(BLOCKS) == {A: 20}  # who has block 19 has those before it

    mirror.replace(A, number=3, hashes=BLOCKS[:20])
    assert mirror.incomplete() == ()
    assert mirror.longest(BLOCKS) == {A: 20}


def test_a_change_or_snapshot_that_comes_twice_or_late_changes_nothing() -> None:
    mirror = a_mirror(Change(A, 1, added=BLOCKS[:5]), Change(A, 2, removed=BLOCKS[3:5]), Change(A, 1, added=BLOCKS[:5]))
    mirror.replace(A, number=1, hashes=BLOCKS[:5])

    assert mirror.longest(BLOCKS) == {A: 3}


def test_i2_a_restarted_node_does_not_inherit_its_old_blocks() -> None:
    reborn = Holder(Incarnation("a", 99), Role.PREFILL)
    mirror = a_mirror(Change(A, 1, added=BLOCKS), Change(reborn, 1, added=BLOCKS[:2]))

    assert mirror.longest(BLOCKS)[reborn] == 2
    mirror.forget(A)
    assert mirror.longest(BLOCKS) == {reborn: 2}
    assert mirror.num_blocks == 2


def test_i4_a_prompt_of_4096_blocks_is_found_whole() -> None:
    many = [at.to_bytes(16, "big") for at in range(4096)]

    assert a_mirror(Change(A, 1, added=many), max_blocks=5000).longest(many) == {A: 4096}


def test_i7_the_mirror_stays_under_its_cap_and_says_that_it_forgot() -> None:
    mirror = a_mirror(max_blocks=100)
    for number in range(1, 200):
        mirror.apply(Change(A, number, added=[(number * 10 + at).to_bytes(16, "big") for at in range(10)]))

    assert mirror.num_blocks == 100
    assert mirror.is_truncated
    assert mirror.incomplete() == (A,)


def test_a_mirror_that_loses_changes_is_right_again_after_a_snapshot() -> None:
    rng = random.Random(5)
    mirror, held = a_mirror(), set[int]()
    for number in range(1, 500):
        depth, has = rng.randrange(40), rng.random() < 0.6
        added = [at for at in range(depth) if at not in held] if has else []
        removed = [] if has else [at for at in range(depth, 40) if at in held]
        held = (held | set(added)) - set(removed)
        if rng.random() > 0.1:
            change = Change(A, number, [BLOCKS[at] for at in added], [BLOCKS[at] for at in removed])
            mirror.apply(change)
        if number % 50 == 0:
            mirror.replace(A, number=number, hashes=[BLOCKS[at] for at in held])
            assert mirror.longest(BLOCKS) == {A: len(held)}
