"""One cluster per test module (its SPEC), reused by its tests; after each test nothing may be held any more."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from cluster.cluster import Cluster, running

pytest.register_assert_rewrite("operations.checks")  # its tests are imported by modules here


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with running(request.module.SPEC) as started:
        yield started


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").assert_settled()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    started = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and started is not None:
        report.sections.append(("cluster", started.logs()))
    return report
