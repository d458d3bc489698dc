"""A newcomer that has measured nothing is taken to be like the others, not like a default."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvrelay.core.types import Incarnation, Role
from kvrelay.router.books import Books
from kvrelay.router.cost import DEFAULT_COST, NodeCost
from kvrelay.router.fleet import NodeView
from kvrelay.router.learned import Learned
from kvrelay.router.placement import Question, place
from kvrelay.router.usual import with_usual_costs

SLOW = NodeCost(token_s=2e-3, step_s=0.05, sequence_s=0.01, is_measured=True)  # 20 times the defaults
FAST = NodeCost(token_s=2e-6, step_s=1e-5, sequence_s=1e-6, is_measured=True)


def a_node(name: str, role: Role, cost: NodeCost = DEFAULT_COST, *, model: str = "m") -> NodeView:
    return NodeView(
        incarnation=Incarnation(name, 1), role=role, endpoint="", ring_size=1, layout_fingerprint=b"f", model=model,
        dtype="float32", max_model_len=100_000, block_tokens=64, page_tokens=64, total_pages=20_000, free_pages=20_000,
        active_requests=0, queued_tokens=0, draining=False, cost=cost,
    )  # fmt: skip


def placed(nodes: list[NodeView], num_requests: int = 60) -> Counter[str]:
    """Requests per node, none of which ends."""
    books, found = Books(), Counter[str]()
    for _ in range(num_requests):
        question = Question(
            prompt_tokens=1000, total_tokens=1100, needs_decode=True, long_prompt_tokens=1024, loads=books.loads()
        )
        pair = place(nodes, question)
        books.enter(pair, decode_pages=1, hashes=())
        assert pair.decode is not None
        found.update([pair.prefill.incarnation.name, pair.decode.incarnation.name])
    return found


@pytest.mark.parametrize("cost", [SLOW, FAST])
def test_a_newcomer_gets_its_share_and_neither_all_requests_nor_none(cost: NodeCost) -> None:
    old = [a_node(name, role, cost) for role in Role for name in (f"{role.value}1", f"{role.value}2")]
    new = [a_node(f"new-{role.value}", role) for role in Role]

    share = placed(with_usual_costs([*old, *new]))

    assert 15 <= share["new-prefill"] <= 25  # of 60, three nodes
    assert 15 <= share["new-decode"] <= 25
    naive = placed([*old, *new])
    assert not (15 <= naive["new-prefill"] <= 25)
    assert not (15 <= naive["new-decode"] <= 25)


def test_what_is_usual_is_the_median_node_of_the_like_else_of_the_role_else_the_default() -> None:
    def cost(token_s: float) -> NodeCost:
        return NodeCost(token_s=token_s, is_measured=True)

    others = [a_node(f"o{at}", Role.PREFILL, cost(0.1), model="other") for at in range(5)]
    like = [a_node(f"p{at}", Role.PREFILL, cost(token_s)) for at, token_s in enumerate((1.0, 2.0, 90.0))]
    found = with_usual_costs(
        [*others, *like, a_node("new", Role.PREFILL), a_node("x", Role.PREFILL, model="x"), a_node("d", Role.DECODE)]
    )
    costs = {node.incarnation.name: node.cost for node in found}

    assert costs["new"] == replace(cost(2.0), is_measured=False)  # nobody is refused on what is assumed
    assert costs["x"].token_s == 0.1
    assert costs["d"] == DEFAULT_COST
    assert [costs[f"p{at}"].token_s for at in range(3)] == [1.0, 2.0, 90.0]


def test_a_newcomer_is_taken_to_be_as_far_off_as_the_others_are() -> None:
    learned = Learned()
    nodes = [a_node(f"p{at}", Role.PREFILL, SLOW) for at in range(4)]
    for node in nodes:  # each takes four times what it published, whatever was assumed of it
        (assumed,) = (one for one in learned.corrected(nodes) if one.incarnation == node.incarnation)
        predicted_s = assumed.cost.token_s / SLOW.token_s
        learned.observe_prefill(node.incarnation, predicted_s=predicted_s, observed_s=4.0)
    new, decode = a_node("new", Role.PREFILL, SLOW), a_node("d", Role.DECODE, SLOW)

    *_, corrected, untouched = learned.corrected([*nodes, new, decode])
    assert corrected.cost.token_s == pytest.approx(4.0 * SLOW.token_s)
    assert untouched == decode

    learned.observe_prefill(new.incarnation, predicted_s=4.0, observed_s=4.0)  # just as was assumed
    assert learned.corrected([*nodes, new])[-1].cost.token_s == pytest.approx(4.0 * SLOW.token_s)
