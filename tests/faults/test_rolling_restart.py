"""R1: every member of a fleet is restarted under load, one after the other, and no request fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.cluster import vocab_size, wait_until
from operations.deployment import MODEL, ROLES, Deployment
from operations.load import Load
from operations.processes import processes
from oracle_data import oracle_folder

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
NUM_REQUESTS = 300
NUM_CLIENTS = 12
# Seven processes start and stop on a few cores: what takes milliseconds elsewhere may take a second.
PATIENT = ("--lease-s", "15", "--lame-duck-s", "2")
NUM_STREAMS = 500
NODE = (*PATIENT, "--max-model-len", "1024", "--dtype", "float32", "--pool-pages", "512")
OPTIONS = {"router": PATIENT, "prefill": (*NODE, "--chunk-tokens", "256"), "decode": NODE}

# Room for all streams on the one node of each role that is left while the other restarts.
ROOM = ("--pool-pages", "1536", "--max-model-len", "1024", "--dtype", "float32")
ROOMY = {
    "router": (*PATIENT, "--drain-s", "300"),
    "prefill": (*PATIENT, *ROOM, "--max-queued-requests", "1024"),
    "decode": (*PATIENT, *ROOM, "--max-requests", "1024"),
}


@pytest.fixture
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with processes(oracle_folder(MODEL), tmp_path_factory.mktemp("logs"), OPTIONS) as started:
        for role in ROLES:
            started.scale(role, 2)
        yield started


def test_r1_a_rolling_restart_of_every_role_under_load_fails_no_request(deployment: Deployment) -> None:
    """R1. Clients have the README's service config: two addresses, health, retries."""
    with Load(deployment.client, clients=NUM_CLIENTS, vocab_size=vocab_size(oracle_folder(MODEL))) as load:
        for role in ("decode", "prefill", "router"):
            for name in deployment.members(role):
                seen = len(load.answers)
                deployment.restart(name)
                load.wait_for(seen + NUM_CLIENTS, 60)
        load.wait_for(NUM_REQUESTS, 120)

    assert not load.failures, (len(load.failures), len(load.answers), load.failures[:5])
    assert len(load.answers) >= NUM_REQUESTS
    deployment.client.assert_settled(30)


@pytest.fixture
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with processes(oracle_folder(MODEL), tmp_path_factory.mktemp("logs"), ROOMY) as started:
        for role in ROLES:
            started.scale(role, 2)
        yield started


def test_r1_five_hundred_streams_in_flight_outlive_a_rolling_restart(roomy: Deployment) -> None:
    """R1: what is asked to stop has hundreds to finish, and its sister takes all the others."""
    load = Load(
        roomy.client, clients=NUM_STREAMS, vocab_size=vocab_size(oracle_folder(MODEL)), prompt_tokens=16, max_tokens=8,
        is_patient=True,
    )  # fmt: skip
    in_flight: list[int] = []
    with load:
        wait_until(lambda: load.num_in_flight == NUM_STREAMS, 60)
        for role in ("decode", "prefill", "router"):
            for name in roomy.members(role):
                in_flight.append(load.num_in_flight)
                seen = len(load.answers)
                roomy.restart(name)
                load.wait_for(seen + NUM_STREAMS, 240)

    assert not load.failures, (len(load.failures), len(load.answers), load.failures[:5])
    assert min(in_flight) > 0.9 * NUM_STREAMS, in_flight  # the others are between two requests at that moment
    assert len(load.answers) >= 6 * NUM_STREAMS
    roomy.client.assert_settled(30)
