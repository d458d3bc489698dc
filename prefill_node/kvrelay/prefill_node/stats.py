"""What a prefill node says of itself: pages, jobs and counters of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.types import Incarnation, counted_together
from kvrelay.prefill_node.control import RingControl
from kvrelay.prefill_node.jobs import Phase
from kvrelay.proto.convert import incarnation_to_pb
from kvrelay.proto.v1 import common_pb2


def node_stats(
    incarnation: Incarnation,
    control: RingControl,
    rank_counters: Sequence[dict[str, float]],
    node_counters: Sequence[dict[str, float]],
    *,
    draining: bool,
) -> common_pb2.NodeStats:
    """Return the account of all ranks. Called between two steps.

    Args:
        node_counters: of the parts that belong to no rank.
    """
    account, phases = control.account(), control.phases()
    pushing = {"pushing": len(control.pushes)} if len(control.pushes) else {}
    active = sum(number for phase, number in phases.items() if phase is not Phase.CLOSING)
    return common_pb2.NodeStats(
        node=incarnation_to_pb(incarnation),
        total_pages=account.total,
        free_pages=account.free,
        cached_pages=account.cached,
        pinned_pages=account.pinned,
        quarantined_pages=account.quarantined,
        sessions={phase.value: number for phase, number in phases.items()} | pushing,
        active_requests=active,
        queued_requests=phases[Phase.QUEUED],
        draining=draining,
        counters=merged_counters(rank_counters, node_counters),
    )


def merged_counters(
    rank_counters: Sequence[dict[str, float]], node_counters: Sequence[dict[str, float]] = ()
) -> dict[str, float]:
    """Return each rank's counters under `<name>_rank<N>`, and under `<name>` those of all ranks and parts together."""
    of_ranks = {
        f"{name}_rank{rank}": value for rank, counters in enumerate(rank_counters) for name, value in counters.items()
    }
    return of_ranks | counted_together([*rank_counters, *node_counters])
