"""What the index is told of a node whose blocks move between its pool and its host memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvrelay.core.types import Incarnation, Tier
from kvrelay.index.writer import PrefixWriter
from kvrelay.prefill_node.jobs import CacheChanged
from kvrelay.prefill_node.published import Published

Told = dict[Tier, list[tuple[str, tuple[bytes, ...]]]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What each writer was asked to tell."""
    found: Told = {Tier.DEVICE: [], Tier.HOST: []}
    made = PrefixWriter.__init__

    def init(self: PrefixWriter, *args: object, tier: Tier = Tier.DEVICE, **rest: object) -> None:
        made(self, *args, tier=tier, **rest)  # type: ignore[arg-type]

        def publish(hashes: Sequence[bytes]) -> None:
            found[tier].append(("+", tuple(hashes)))

        def retract(hashes: Sequence[bytes]) -> None:
            found[tier].append(("-", tuple(hashes)))

        monkeypatch.setattr(self, "publish", publish)
        monkeypatch.setattr(self, "retract", retract)

    monkeypatch.setattr(PrefixWriter, "__init__", init)
    return found


def published(*, has_host_tier: bool) -> Published:
    return Published(
        index_url="redis://127.0.0.1:1/0", fleet="f", node=Incarnation("a", 1), has_host_tier=has_host_tier
    )


async def test_a_block_that_leaves_for_host_memory_leaves_only_the_pool(told: Told) -> None:
    one = published(has_host_tier=True)
    one.apply(CacheChanged(added=(b"a", b"b")))
    one.apply(CacheChanged(removed=(b"b",), host_added=(b"b",)))

    assert told[Tier.DEVICE] == [("+", (b"a", b"b")), ("-", (b"b",))]
    assert told[Tier.HOST] == [("+", (b"a", b"b"))]

    one.apply(CacheChanged(added=(b"b",)))  # loaded; host memory keeps it
    one.apply(CacheChanged(host_removed=(b"b",)))
    assert told[Tier.HOST] == [("+", (b"a", b"b"))]

    one.apply(CacheChanged(removed=(b"b",)))
    assert told[Tier.HOST][1:] == [("-", (b"b",))]


async def test_a_block_that_is_evicted_without_room_leaves_both(told: Told) -> None:
    one = published(has_host_tier=True)
    one.apply(CacheChanged(added=(b"a",)))
    one.apply(CacheChanged(removed=(b"a",)))

    assert told[Tier.DEVICE] == told[Tier.HOST] == [("+", (b"a",)), ("-", (b"a",))]


async def test_without_host_memory_there_is_one_holder(told: Told) -> None:
    published(has_host_tier=False).apply(CacheChanged(added=(b"a",)))

    assert (told[Tier.DEVICE], told[Tier.HOST]) == ([("+", (b"a",))], [])
