"""Among many nodes the choice is that of the scan over all of them, and takes few steps."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.core.bits import positions
from kvrelay.core.clock import ManualClock
from kvrelay.core.errors import InvalidRequestError, UnavailableError
from kvrelay.core.types import Incarnation, Role
from kvrelay.router import placement, shortlist
from kvrelay.router.books import Books
from kvrelay.router.cost import NodeCost
from kvrelay.router.fleet import NodeView
from kvrelay.router.load_columns import LoadColumns
from kvrelay.router.placement import NO_LOAD, Load, Pair, Question, place
from kvrelay.router.replicas import together
from kvrelay.router.shortlist import SMALL_FLEET, Roster
from kvrelay.router.tentative import TentativeBlocks

PAGE = 64


def a_fleet(rng: random.Random, num_nodes: int) -> list[NodeView]:
    """Nodes of two layouts, some alike to the last digit, some full, slow, draining or too small."""
    costs = [
        NodeCost(
            start_s=rng.choice((0.0, 0.01)), token_s=rng.choice((1e-5, 1e-4)), pair_s=rng.choice((0.0, 4e-10)),
            break_even_tokens=rng.choice((0, 4096)), step_s=rng.choice((2e-3, 0.02)), context_token_s=1e-8,
            is_measured_local=rng.random() < 0.5,
        )
        for _ in range(3)
    ]  # fmt: skip
    names = rng.sample(range(10 * num_nodes), num_nodes)
    return [
        NodeView(
            incarnation=Incarnation(f"n{name}", 1), role=rng.choice(list(Role)), endpoint="",
            ring_size=rng.choice((1, 1, 2, 4)), layout_fingerprint=rng.choice((b"f", b"f", b"g")), model="m",
            dtype="bfloat16", max_model_len=rng.choice((1 << 20, 1 << 20, 900)), block_tokens=PAGE,
            page_tokens=rng.choice((PAGE, 32)), total_pages=rng.choice((40_000, 40_000, 10)),
            free_pages=rng.choice((40_000, 100, 0)), active_requests=rng.choice((0, 0, 5)),
            queued_tokens=rng.choice((0, 0, 700, 90_000)), draining=rng.random() < 0.1, cost=rng.choice(costs),
            links={f"n{other}": rng.choice((1e-6, 1e-5, 1e-4)) for other in rng.sample(names, 20)},
            local_tokens=rng.choice((0, 256, 2000)), pulls=rng.random() < 0.7, chunk_tokens=rng.choice((0, 512, 8192)),
            max_batch=rng.choice((0, 2, 4, 64)), host_token_s=rng.choice((0.0, 1e-6, 1e-3)),
        )
        for name in names
    ]  # fmt: skip


def some_loads(rng: random.Random, nodes: list[NodeView], *, turns: bool) -> dict[Incarnation, Load]:
    busy = rng.sample(nodes, len(nodes) // 2)
    return {
        node.incarnation: Load(
            rng.randrange(9), rng.randrange(5000), rng.randrange(200),
            tuple(sorted(rng.choice((0.01, 0.3, 5.0)) for _ in range(rng.randrange(4)))), rng.choice((0.0, 3.0, 60.0)),
            rng.randrange(200_000), rng.choice(((), (), (5000,), (900, 40_000))), turn if turns else 0,
        )
        for turn, node in enumerate(busy, 1)
    }  # fmt: skip


def columns_of(loads: dict[Incarnation, Load]) -> LoadColumns:
    columns = LoadColumns()
    for node, load in loads.items():
        columns.add(node, requests=load.requests, tokens=load.tokens, pages=load.pages, context=load.context)
        columns.worked(node, load.recent_s)
        for work_s in load.works_s:
            columns.put(node, work_s)
        for tokens in load.fetches:
            columns.put_fetch(node, tokens)
        if load.turn:
            columns.count_turn([node])
    return columns


def outcome(choose: object) -> tuple[object, ...]:
    """What came of a choice, in a form that can be compared."""
    try:
        pair: Pair = choose()  # type: ignore[operator]
    except (InvalidRequestError, UnavailableError) as err:
        return type(err), str(err)
    where = pair.prefill, pair.decode, pair.local and pair.local.parts, pair.pull, pair.late_pull
    why = pair.way, pair.why_shared, pair.refused
    return *where, *why, pair.remaining_tokens, pair.work_s, pair.backlog_s(), pair.step_s()


@given(seed=st.integers(0, 1 << 32), extra=st.integers(1, 150), strict=st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_choice_among_many_is_that_of_the_scan_over_all(seed: int, extra: int, strict: bool) -> None:
    rng = random.Random(seed)
    nodes = a_fleet(rng, SMALL_FLEET + extra)
    own, others = some_loads(rng, nodes, turns=True), {}
    if rng.random() < 0.5:
        others = some_loads(rng, nodes, turns=False)
    prompt = rng.choice((1, 63, 1000, 50_000))
    holders = rng.sample(nodes, rng.choice((0, 3, len(nodes))))
    cached = {one.incarnation: rng.choice((PAGE, prompt // 2 // PAGE * PAGE, prompt)) for one in holders}
    question = Question(
        prompt_tokens=prompt, total_tokens=prompt + rng.choice((1, 500)), needs_decode=rng.random() < 0.8,
        long_prompt_tokens=1024, usual_link_s=rng.choice((0.0, 1e-5)), cached_tokens=cached,
        no_pull=frozenset(one.incarnation for one in rng.sample(nodes, 5)),
        held_tokens={one: tokens for one, tokens in cached.items() if rng.random() < 0.8},
        host_tokens={one.incarnation: prompt // PAGE * PAGE for one in rng.sample(nodes, rng.choice((0, 5, 40)))},
        loads=together(own, others), avoid=frozenset(one.incarnation for one in rng.sample(nodes, 2)),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if strict:  # the very first of each role is the same, not only one of a few
            patch.setattr(shortlist, "_KEPT", 1)
            patch.setattr(placement, "_JOINT", 1)
        roster = Roster(nodes)
        columns = [columns_of(own), columns_of(others)]

        assert outcome(lambda: roster.place(question, columns)) == outcome(lambda: place(nodes, question))

        slower = replace(nodes[5], cost=replace(nodes[5].cost, token_s=1e-7))
        nodes[5] = slower
        roster.update(slower)
        assert outcome(lambda: roster.place(question, columns)) == outcome(lambda: place(nodes, question))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 12)), max_size=30), st.randoms())
def test_tentative_blocks_are_those_of_a_walk_through_every_request(
    requests: list[tuple[int, int, int]], rng: random.Random
) -> None:
    def chain(chat: int, depth: int) -> list[bytes]:
        """The first two blocks are everybody's."""
        return [bytes([chat if at > 1 else 99, at]) for at in range(depth)]

    blocks, held = TentativeBlocks(), []
    for node, chat, depth in requests:
        blocks.add(node * 7, chain(chat, depth))
        held.append((node * 7, chain(chat, depth)))
        if rng.random() < 0.3:
            blocks.remove(*held.pop(rng.randrange(len(held))))
        for wanted in (chain(chat, depth), chain(rng.randrange(4), 12), []):
            walked: dict[int, int] = {}
            for name, hashes in held:
                common = next((at for at, one in enumerate(wanted) if one not in hashes), len(wanted))
                walked[name] = max(common, walked.get(name, 0))
            assert blocks.longest(wanted) == {name: depth for name, depth in walked.items() if depth}
    for node, hashes in held:
        blocks.remove(node, hashes)
    assert blocks.longest(chain(0, 12)) == {}


@given(st.sets(st.integers(0, 2000)))
def test_the_positions_of_bits_are_those_that_were_set(numbers: set[int]) -> None:
    assert positions(sum(1 << one for one in numbers)) == sorted(numbers)


def test_columns_show_the_load_of_each_node_and_forget_the_idle_ones_first() -> None:
    columns = LoadColumns()
    a, b, c = (Incarnation(name, 1) for name in "abc")
    first = columns.put(a, 2.0)
    columns.put(a, 3.0)
    columns.add(b, requests=1, pages=4)
    columns.worked(c, 7.0)
    assert columns == {a: NO_LOAD, b: Load(1, 0, 4), c: NO_LOAD}
    assert (columns[a].works_s, columns[c].recent_s) == ((2.0, 3.0), 7.0)

    columns.take(first)
    columns.at(3600.0)
    assert columns[a].works_s == (3.0,)
    assert columns[c].recent_s == pytest.approx(7.0 / 2.718281828)
    columns.at(1e6)
    columns.worked(c, 1.0)
    assert columns[c].recent_s == pytest.approx(1.0)

    columns.forget_idle(keep=2)
    assert set(columns) == {a, b}
    assert columns.num_nodes == 2
    assert columns.slot(Incarnation("d", 1)) == 2  # the slot of c
    assert Incarnation("d", 1) not in columns


def test_nodes_that_are_gone_are_forgotten_now_and_then_and_not_at_each_request() -> None:
    node, books = a_fleet(random.Random(7), 20)[0], Books(ManualClock())
    columns, versions = books.loads(), set()
    for life in range(10_000):
        pair = Pair(replace(node, incarnation=Incarnation("n", life)), None, 1, {}, 0.1)
        books.enter(pair, decode_pages=0, hashes=()).release()
        versions.add(columns.version)

    assert columns.num_nodes <= 4096
    assert len(versions) < 10  # what is known of slots is void after each time


def test_a_busy_node_that_has_the_prompt_is_still_one_to_fetch_it_from() -> None:
    rng = random.Random(6)
    plain = [
        replace(
            node, draining=False, layout_fingerprint=b"f", max_model_len=1 << 20, total_pages=40_000, page_tokens=PAGE,
            free_pages=40_000, pulls=True, cost=NodeCost(token_s=1e-3),
        )
        for node in a_fleet(rng, 200)
    ]  # fmt: skip
    at = next(at for at, node in enumerate(plain) if node.role is Role.DECODE)
    plain[at] = replace(plain[at], active_requests=500)
    question = Question(
        prompt_tokens=20_000, total_tokens=20_100, needs_decode=True, long_prompt_tokens=1024,
        cached_tokens={plain[at].incarnation: 19_000},
    )  # fmt: skip
    pair = Roster(plain).place(question, [LoadColumns()])

    assert pair.pull is not None
    assert pair.pull == place(plain, question).pull
    assert pair.decode is not plain[at]


def test_a_thousand_nodes_are_placed_on_in_a_fraction_of_the_scan() -> None:
    rng = random.Random(4)
    nodes = [
        replace(node, draining=False, layout_fingerprint=b"f", max_model_len=1 << 20, total_pages=40_000)
        for node in a_fleet(rng, 1000)
    ]
    books, roster = Books(ManualClock()), Roster(nodes)
    question = Question(
        prompt_tokens=12_000, total_tokens=12_300, needs_decode=True, long_prompt_tokens=1024, loads=books.loads(),
        cached_tokens={node.incarnation: 64 for node in nodes},
    )  # fmt: skip

    for _ in range(2):  # with the first ones it is found which slots of the loads are whose
        books.enter(roster.place(question, [books.loads()]), decode_pages=10, hashes=[rng.randbytes(16)])

    def calls(choose: Callable[[], Pair]) -> int:
        """How many functions are called: unlike time, that is the same on every machine, however busy."""
        events: list[str] = []
        sys.setprofile(lambda _frame, event, _what: events.append(event))
        try:
            choose()
        finally:
            sys.setprofile(None)
        return sum(event in {"call", "c_call"} for event in events)

    assert calls(lambda: roster.place(question, [books.loads()])) < 0.03 * calls(lambda: place(nodes, question))


def test_the_decode_node_that_has_a_chat_is_found_among_many_to_complete_it() -> None:
    rng = random.Random(5)
    nodes = [replace(node, local_tokens=256) for node in a_fleet(rng, 200)]
    fast = (one for one in nodes if one.role is Role.DECODE and one.cost.step_s < 0.01 and one.max_model_len > 9000)
    quick = NodeCost(token_s=1e-6, step_s=1e-3, is_measured_local=True)
    holder = replace(
        next(fast), active_requests=1, free_pages=40_000, total_pages=40_000, draining=False, cost=quick
    )  # fmt: skip
    nodes = [holder if one.incarnation == holder.incarnation else one for one in nodes]
    question = Question(
        prompt_tokens=8000, total_tokens=8100, needs_decode=True, long_prompt_tokens=1024,
        cached_tokens={holder.incarnation: 7936},
    )  # fmt: skip

    pair = Roster(nodes).place(question, [])

    assert pair.local is not None
    assert pair.decode == holder
    assert pair.way == place(nodes, question).way
