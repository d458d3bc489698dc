"""Where the time goes by which a split cluster's second token is later than one node's. All in milliseconds.

The parts add up to the difference: what the client sees, what the router reports of it, and the same on the one node.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from kvrelay.bench.timed import Timed


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
