"""The list of operations tests in containers: the same list as tests/cluster runs on plain processes."""

from __future__ import annotations

import pytest

from operations.checks import (
    test_a_decode_node_is_killed_while_it_streams,
    test_a_killed_prefill_node_costs_no_request_while_another_is_there,
    test_a_prefix_is_computed_and_sent_once,
    test_a_prompt_is_answered_with_the_recorded_tokens,
    test_a_rolling_restart_under_load_costs_no_request,
    test_decode_is_scaled_out_and_in_under_load,
    test_two_nodes_that_cannot_reach_each_other,
)

__all__ = [
    "test_a_decode_node_is_killed_while_it_streams",
    "test_a_killed_prefill_node_costs_no_request_while_another_is_there",
    "test_a_prefix_is_computed_and_sent_once",
    "test_a_prompt_is_answered_with_the_recorded_tokens",
    "test_a_rolling_restart_under_load_costs_no_request",
    "test_decode_is_scaled_out_and_in_under_load",
    "test_two_nodes_that_cannot_reach_each_other",
]
pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]
