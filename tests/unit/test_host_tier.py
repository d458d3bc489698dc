"""Requirements of kvrelay.prefill_node.host_tier: no page of two blocks, oldest out first, what moves stays."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrelay.prefill_node.host_tier import HostTier

RANKS, PAGES = 2, 6


def names_of(text: str) -> list[bytes]:
    return [one.encode() for one in text]


def filled(tier: HostTier, text: str) -> None:
    for name in names_of(text):
        assert tier.put(name, [0])[0] is not None
        tier.arrived(name)


def test_the_least_recently_used_block_goes_first() -> None:
    tier = HostTier([3])
    filled(tier, "abc")
    tier.touch(b"a")

    pages, gone = tier.put(b"d", [0])

    assert (pages is not None, gone) == (True, [b"b"])


def test_what_comes_behind_a_block_goes_before_it() -> None:
    tier = HostTier([3])
    filled(tier, "abc")
    assert len(tier.match(names_of("abc"))) == 3

    assert tier.put(b"d", [0])[1] == [b"c"]


def test_a_block_that_is_still_arriving_is_not_found_and_not_evicted() -> None:
    tier = HostTier([1])
    tier.put(b"a", [0])

    assert tier.match([b"a"]) == []
    assert tier.put(b"b", [0]) == (None, [])

    tier.arrived(b"a")
    assert tier.match([b"a"]) == [((0, 0),)]


def test_a_block_that_is_read_is_not_evicted() -> None:
    tier = HostTier([2])
    filled(tier, "ab")
    tier.pin([b"a", b"b"])
    assert tier.put(b"c", [0]) == (None, [])

    tier.unpin([b"b"])
    assert tier.put(b"c", [0])[1] == [b"b"]


def test_room_is_made_on_the_rank_that_lacks_it() -> None:
    tier = HostTier([1, 2])
    tier.put(b"a", [1])
    tier.put(b"b", [0])
    tier.arrived(b"a")
    tier.arrived(b"b")

    assert tier.put(b"c", [0, 1]) == (((0, 0), (1, 1)), [b"b"])


class TierAgainstItsRules(RuleBasedStateMachine):
    """A plain list of blocks, oldest first, beside the tier."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier([PAGES] * RANKS)
        self.order: list[bytes] = []
        self.ranks: dict[bytes, list[int]] = {}
        self.arriving: set[bytes] = set()
        self.read: dict[bytes, int] = {}
        self.number = 0

    def free(self, rank: int) -> int:
        return PAGES - sum(ranks.count(rank) for ranks in self.ranks.values())

    @rule(ranks=st.lists(st.integers(0, RANKS - 1), min_size=1, max_size=4))
    def put(self, ranks: list[int]) -> None:
        self.number += 1
        name = b"%d" % self.number
        short = {rank: ranks.count(rank) - self.free(rank) for rank in set(ranks)}
        expected = []
        for one in self.order:
            if (
                one in self.arriving
                or self.read.get(one)
                or not any(short.get(rank, 0) > 0 for rank in self.ranks[one])
            ):
                continue
            expected.append(one)
            for rank in self.ranks[one]:
                short[rank] = short.get(rank, 0) - 1
        pages, gone = self.tier.put(name, ranks)
        if any(missing > 0 for missing in short.values()):
            assert (pages, gone) == (None, [])
            return
        assert pages is not None
        assert [rank for rank, _ in pages] == ranks
        assert gone == expected
        for one in gone:
            self.order.remove(one)
            del self.ranks[one]
        self.order.append(name)
        self.ranks[name] = ranks
        self.arriving.add(name)

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        if self.arriving:
            name = data.draw(st.sampled_from(sorted(self.arriving)))
            self.tier.arrived(name)
            self.arriving.remove(name)

    @rule(data=st.data())
    def match_and_read(self, data: st.DataObject) -> None:
        if not self.order:
            return
        asked = data.draw(st.lists(st.sampled_from(self.order), unique=True, max_size=4))
        here = []
        for name in asked:
            if name in self.arriving:
                break
            here.append(name)
        assert [[rank for rank, _ in pages] for pages in self.tier.match(asked)] == [self.ranks[one] for one in here]
        for name in reversed(here):
            self.order.remove(name)
            self.order.append(name)
        self.tier.pin(here)
        for name in here:
            self.read[name] = self.read.get(name, 0) + 1

    @rule(data=st.data())
    def end_reading(self, data: st.DataObject) -> None:
        if reading := sorted(name for name, number in self.read.items() if number):
            name = data.draw(st.sampled_from(reading))
            self.tier.unpin([name])
            self.read[name] -= 1

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        self.tier.check()
        assert len(self.tier) == len(self.order)
        assert self.tier.used_pages == sum(len(ranks) for ranks in self.ranks.values())
        assert all(self.free(rank) >= 0 for rank in range(RANKS))


TestTierAgainstItsRules = TierAgainstItsRules.TestCase
TestTierAgainstItsRules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
