"""The list of operations tests on plain processes; tests/compose runs the same list in containers."""

from __future__ import annotations

from collections.abc import Iterator

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
from operations.deployment import MODEL, Deployment
from operations.processes import processes
from oracle_data import oracle_folder

__all__ = [
    "test_a_decode_node_is_killed_while_it_streams",
    "test_a_killed_prefill_node_costs_no_request_while_another_is_there",
    "test_a_prefix_is_computed_and_sent_once",
    "test_a_prompt_is_answered_with_the_recorded_tokens",
    "test_a_rolling_restart_under_load_costs_no_request",
    "test_decode_is_scaled_out_and_in_under_load",
    "test_two_nodes_that_cannot_reach_each_other",
]
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]
NODE = ("--pool-pages", "256", "--max-model-len", "2048", "--dtype", "float32")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    options = {"prefill": (*NODE, "--chunk-tokens", "256"), "decode": NODE}
    with processes(oracle_folder(MODEL), tmp_path_factory.mktemp("logs"), options) as started:
        yield started
