"""What this node tells routers of its speed: decode steps, and prompt tokens that it computes itself, as measured."""

from __future__ import annotations

from kvrelay.core.time_fit import Fitted
from kvrelay.proto.v1 import fleet_pb2


def cost_of(steps: Fitted | None, local: Fitted | None, *, now_s: float) -> fleet_pb2.NodeCost | None:
    """Return the cost, or None before steps were measured.

    Args:
        local: of chunks of prompts that were computed here, if enough were.
        now_s: on the clock of the fits.
    """
    if steps is None:
        return None
    cost = fleet_pb2.NodeCost(
        step_s=steps.start_s,
        sequence_s=steps.first_s,
        context_token_s=steps.second_s,
        observations=steps.observations,
        age_s=now_s - steps.at_s,
    )
    if local is not None:
        cost.start_s, cost.token_s, cost.pair_s = local.start_s, local.first_s, local.second_s
        cost.local_observations, cost.local_age_s = local.observations, now_s - local.at_s
    return cost
