"""Containers for the tests here: images from this tree, then one deployment for all tests of a module."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from compose.containers import FILE, PATIENT, compose, containers, engine_runs
from operations.deployment import MODEL, Deployment
from oracle_data import oracle_folder

pytest.register_assert_rewrite("operations.checks")


def environment() -> dict[str, str]:
    """Return the compose file's variables for small nodes, within what this machine allows."""
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "KVRELAY_MODEL": str(oracle_folder(MODEL)),
        "KVRELAY_MEMLOCK": str(-1 if locked == resource.RLIM_INFINITY else locked),
        "KVRELAY_PUBLISH": "127.0.0.1:0",
        "KVRELAY_POOL_MIB": "16",
        "KVRELAY_MAX_MODEL_LEN": "2048",
        "KVRELAY_CHUNK_TOKENS": "256",
        "KVRELAY_RING_SIZE": "2",
    }


@pytest.fixture(scope="session")
def images() -> None:
    """Build both images; KVRELAY_BASE_IMAGE and KVRELAY_PIP_ARGS say from what."""
    if why_not := engine_runs():
        pytest.fail(f"no Docker engine can be used: {why_not}")
    compose(environment(), "--profile", "cpu", "build", "router", "decode")


@pytest.fixture(scope="module")
def deployment(images: None) -> Iterator[Deployment]:
    with containers(environment(), files=(FILE, PATIENT)) as started:
        yield started
