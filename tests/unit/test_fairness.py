"""Quotas and turns: what one tenant does must not be another's problem."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.clock import ManualClock
from kvrelay.core.errors import QuotaError
from kvrelay.router.fair_queue import FairQueue, Ticket
from kvrelay.router.quota import QuotaBooks
from kvrelay.router.tenants import Quota, Tenant
from kvrelay.router.turnstile import Pass, Turnstile

RED, BLUE = Tenant("red"), Tenant("blue")


def ticket(tenant: str, tokens: float = 100.0, weight: float = 1.0) -> Ticket:
    return Ticket(tenant, tokens, weight)


def served(queue: FairQueue, count: int) -> str:
    return "".join(taken.tenant[0] for taken in (queue.next() for _ in range(count)) if taken is not None)


# -- turns


def test_a_flood_does_not_delay_another_tenants_share() -> None:
    queue = FairQueue()
    for _ in range(1000):
        queue.add(ticket("red"))
    assert served(queue, 10) == "r" * 10
    for _ in range(5):
        queue.add(ticket("blue"))

    assert served(queue, 10).count("b") == 5
    assert served(queue, 1) == "r"


def test_shares_are_of_tokens_not_of_requests() -> None:
    queue = FairQueue()
    for _ in range(50):
        queue.add(ticket("red", 1000))
    for _ in range(500):
        queue.add(ticket("blue", 100))

    order = served(queue, 220)
    assert 18 <= order.count("r") <= 22


def test_twice_the_weight_is_twice_the_share() -> None:
    queue = FairQueue()
    for _ in range(300):
        queue.add(ticket("red", weight=2.0))
        queue.add(ticket("blue"))

    assert served(queue, 300).count("r") == pytest.approx(200, abs=2)


def test_nobody_saves_up_a_right_to_a_burst() -> None:
    queue = FairQueue()
    queue.add(ticket("blue"))
    assert served(queue, 1) == "b"
    for _ in range(200):
        queue.add(ticket("red"))
    served(queue, 100)
    for _ in range(100):
        queue.add(ticket("blue"))

    assert 48 <= served(queue, 100).count("b") <= 52


def test_a_tenant_without_requests_is_forgotten_when_the_rest_has_caught_up() -> None:
    queue = FairQueue()
    queue.add(ticket("blue", 150))
    queue.next()
    for _ in range(4):
        queue.add(ticket("red", 100))
    served(queue, 2)
    assert set(queue._lanes) == {"blue", "red"}
    served(queue, 2)

    assert set(queue._lanes) == {"red"}


@given(
    st.lists(st.tuples(st.sampled_from("rgb"), st.integers(1, 500)), min_size=1, max_size=60), st.sampled_from("rgb")
)
def test_what_is_said_to_be_ahead_is_what_is_served_before(requests: list[tuple[str, int]], asking: str) -> None:
    queue = FairQueue()
    for tenant, tokens in requests:
        queue.add(ticket(tenant, tokens))
    ahead, mine = queue.tokens_ahead(asking), ticket(asking, 1)
    queue.add(mine)
    before = 0.0
    while (taken := queue.next()) is not mine:
        assert taken is not None
        before += taken.tokens

    largest = max(tokens for _, tokens in requests)
    assert abs(before - ahead) <= 2 * largest  # ties go by name


# -- turnstile


async def asking(turnstile: Turnstile, tenant: Tenant, done: list[str]) -> Pass:
    passed = await turnstile.turn(tenant, 100)
    done.append(tenant.name)
    return passed


async def test_as_many_as_there_is_room_pass_at_once_and_the_others_wait() -> None:
    turnstile = Turnstile(lambda: 2)
    passes = [await turnstile.turn(RED, 1) for _ in range(2)]
    waiting = asyncio.create_task(turnstile.turn(RED, 1))
    await asyncio.sleep(0)
    assert turnstile.num_waiting == 1
    passes[0].end()
    passes[0].end()

    assert (await waiting).waited
    assert not passes[1].waited
    assert turnstile.num_waiting == 0


async def test_a_late_tenant_passes_before_the_flood_that_came_first() -> None:
    turnstile, done = Turnstile(lambda: 1), list[str]()
    first = await turnstile.turn(RED, 100)
    flood = [asyncio.create_task(asking(turnstile, RED, done)) for _ in range(50)]
    await asyncio.sleep(0)
    late = [asyncio.create_task(asking(turnstile, BLUE, done)) for _ in range(3)]
    await asyncio.sleep(0)
    passed = first
    for _ in range(6):
        passed.end()
        while True:
            await asyncio.sleep(0)
            ended = [task for task in (*flood, *late) if task.done() and task.result()._turnstile is not None]
            if ended:
                break
        passed = ended[0].result()

    assert done[:6].count("blue") == 3
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    assert turnstile.num_waiting == 0


async def test_a_cancelled_request_leaves_the_queue_at_once() -> None:
    turnstile = Turnstile(lambda: 1)
    holding = await turnstile.turn(RED, 1)
    waiting = [asyncio.create_task(turnstile.turn(BLUE, 1)) for _ in range(10)]
    await asyncio.sleep(0)
    for task in waiting[:9]:
        task.cancel()
    await asyncio.gather(*waiting[:9], return_exceptions=True)
    assert turnstile.num_waiting == 1
    holding.end()

    (await waiting[9]).end()
    assert not (await turnstile.turn(RED, 1)).waited


async def test_a_request_that_is_cancelled_as_its_turn_comes_keeps_no_place() -> None:
    turnstile = Turnstile(lambda: 1)
    holding = await turnstile.turn(RED, 1)
    waiting = asyncio.create_task(turnstile.turn(BLUE, 1))
    await asyncio.sleep(0)
    holding.end()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    assert not (await turnstile.turn(RED, 1)).waited


async def test_a_place_that_frees_as_those_who_wait_are_cancelled_goes_to_one_who_still_waits() -> None:
    turnstile = Turnstile(lambda: 1)
    holding = await turnstile.turn(RED, 1)
    gone = [asyncio.create_task(turnstile.turn(BLUE, 1000)) for _ in range(3)]
    await asyncio.sleep(0)
    staying = asyncio.create_task(turnstile.turn(BLUE, 1))
    await asyncio.sleep(0)
    for task in gone:  # as when the connection of a client with many requests breaks: none of them has run since
        task.cancel()
    holding.end()
    await asyncio.gather(*gone, return_exceptions=True)

    passed = await asyncio.wait_for(staying, 20)
    assert all(task.cancelled() for task in gone)
    assert turnstile.num_waiting == 0
    assert turnstile.tokens_ahead(BLUE) == 0
    second = asyncio.create_task(turnstile.turn(RED, 1))
    await asyncio.sleep(0)
    assert turnstile.num_waiting == 1  # nobody but the one who stayed holds the place
    passed.end()
    (await second).end()


def test_a_request_that_was_taken_and_not_served_does_not_count_for_its_tenant() -> None:
    queue = FairQueue()
    for tenant in ("a", "a", "b"):
        queue.add(Ticket(tenant, 100, 1))
    taken = queue.next()
    assert taken is not None
    assert taken.tenant == "a"
    queue.give_back(taken)

    following = queue.next()
    assert following is not None
    assert following.tenant == "a"


# -- quotas


def a_tenant(**quota: float) -> Tenant:
    return Tenant("red", quota=Quota(**quota))  # type: ignore[arg-type]


def test_a_quota_of_requests_is_named_with_its_limit() -> None:
    books, tenant = QuotaBooks(ManualClock()), a_tenant(max_requests=2)
    charges = [books.enter(tenant, prompt_tokens=1, max_tokens=1) for _ in range(2)]
    with pytest.raises(QuotaError, match=r"'red' has 2 requests in work, its quota max_requests is 2") as caught:
        books.enter(tenant, prompt_tokens=1, max_tokens=1)
    assert caught.value.retry_after_s > 0
    books.enter(BLUE, prompt_tokens=1, max_tokens=1)
    books.settle(charges[0], used_tokens=2)
    books.settle(charges[0], used_tokens=2)

    books.enter(tenant, prompt_tokens=1, max_tokens=1)
    with pytest.raises(QuotaError):
        books.enter(tenant, prompt_tokens=1, max_tokens=1)


def test_a_quota_of_tokens_fills_up_with_time_and_the_hint_is_true() -> None:
    clock = ManualClock()
    books, tenant = QuotaBooks(clock), a_tenant(tokens_per_minute=600)
    books.enter(tenant, prompt_tokens=500, max_tokens=100)
    with pytest.raises(
        QuotaError, match=r"asks for 60 tokens and has used 600 lately.* tokens_per_minute is 600"
    ) as caught:
        books.enter(tenant, prompt_tokens=50, max_tokens=10)
    assert caught.value.retry_after_s == pytest.approx(6.0)
    clock.now_s += 6.01

    books.enter(tenant, prompt_tokens=50, max_tokens=10)


def test_what_an_answer_does_not_use_is_given_back() -> None:
    books, tenant = QuotaBooks(ManualClock()), a_tenant(tokens_per_minute=1000)
    charge = books.enter(tenant, prompt_tokens=100, max_tokens=900)
    books.settle(charge, used_tokens=110)

    books.enter(tenant, prompt_tokens=800, max_tokens=90)


def test_one_request_larger_than_a_minutes_quota_is_let_in_alone() -> None:
    books, tenant = QuotaBooks(ManualClock()), a_tenant(tokens_per_minute=100)
    books.enter(tenant, prompt_tokens=5000, max_tokens=1)

    with pytest.raises(QuotaError):
        books.enter(tenant, prompt_tokens=1, max_tokens=1)
