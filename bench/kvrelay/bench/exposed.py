"""Where the time goes by which a split cluster's second token is later than one node's. All in milliseconds.

The parts add up to the difference: what the client sees, what the router reports of it, and the same on the one node.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.bench import report
from kvrelay.bench.timed import Timed


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt, answered three times."""

    ours: Timed  # at the client of the cluster
    one: Timed  # in the process of one node
    served: Timed  # at the client of that node, served over gRPC
    router: Mapping[str, float]  # the cluster's TimeSplit


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the figures of several rounds.

    `exposed_over_ttft` is beside the node in its process: all messages count against the cluster. Beside the node
    served, those count that a user of one node has as well.
    """
    ours, one, served = zip(*((each.ours, each.one, each.served) for each in rounds), strict=True)
    shares, shares_beside_served = exposed_over_ttft(ours, one), exposed_over_ttft(ours, served)
    return {
        "exposed_over_ttft": round(statistics.median(shares), 5),
        "exposed_over_ttft_beside_served": round(statistics.median(shares_beside_served), 5),
        "ttft": _paired(ours, one, token=0),
        "second_token": _paired(ours, one, token=1),
        "ttft_beside_served": _paired(ours, served, token=0),
        "second_token_beside_served": _paired(ours, served, token=1),
        "router_ms": medians_ms([each.router for each in rounds]),
        "exposed_ms": medians_ms([parts_ms(each.ours, each.one, each.router) for each in rounds]),
        "equal_answers": sum(each.ours.token_ids == each.one.token_ids == each.served.token_ids for each in rounds),
        "rounds_ms": [
            [round(at_s * 1e3, 3) for at_s in (*each.ours.at_s, *each.one.at_s, *each.served.at_s)] for each in rounds
        ],  # first and second token through the cluster, then in one node's process, then of that node served
        "exposed": [round(share, 5) for share in shares],
        "exposed_beside_served": [round(share, 5) for share in shares_beside_served],
    }


def exposed_over_ttft(ours: Sequence[Timed], others: Sequence[Timed]) -> list[float]:
    """Return, per pair, what the cluster adds until the second token over the other's time to the first."""
    return [(a.at_s[1] - b.at_s[1]) / b.at_s[0] for a, b in zip(ours, others, strict=True)]


def parts_ms(ours: Timed, one: Timed, router: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of one pair.

    Args:
        ours: first and second token at the client of the cluster.
        one: the same on one node.
        router: the request's TimeSplit.
    """
    first, second = (at_s * 1e3 for at_s in ours.at_s[:2])
    one_first, one_second = (at_s * 1e3 for at_s in one.at_s[:2])
    handed_over = router["exposed_relay_ms"] + router["verify_ms"] + router["admit_ms"]
    return {
        "client_to_router": first - router["ttft_ms"],
        "router": router["queue_ms"] + router["tokenize_ms"] + router["place_ms"],
        "reserve": router["reserve_ms"],
        "router_to_prefill": router["delivery_ms"],
        "prefill_intake": router["prefill_ms"] - router["compute_ms"],
        "prefill_compute": router["compute_ms"] - one_first,
        "relay": router["exposed_relay_ms"],
        "verify": router["verify_ms"],
        "admit": router["admit_ms"],
        "decode_step": router["decode_step_ms"] - (one_second - one_first),
        "decode_to_client": second - first - handed_over - router["decode_step_ms"],
    }


def medians_ms(pairs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each part over pairs."""
    return {name: round(statistics.median(one[name] for one in pairs), 3) for name in pairs[0]}


def _paired(ours: Sequence[Timed], others: Sequence[Timed], *, token: int) -> dict[str, float]:
    return report.paired([one.at_s[token] for one in ours], [one.at_s[token] for one in others])
