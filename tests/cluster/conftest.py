"""One cluster for test modules of equal SPECs, reused by their tests; after each test nothing may be held any more."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import warm_start
from cluster.cluster import Cluster, Spec, running

pytest.register_assert_rewrite("operations.checks")  # its tests are imported by modules here


class Keeper:
    """Has at most one cluster: it ends when the next test is of no module with its spec."""

    def __init__(self) -> None:
        self._spec: Spec | None = None
        self._cluster: Cluster | None = None
        self._open = ExitStack()

    def cluster(self, spec: Spec) -> Cluster:
        if self._cluster is None or spec != self._spec:
            self.end()
            self._spec, self._cluster = spec, self._open.enter_context(running(spec))
        return self._cluster

    def end_unless(self, spec: Spec | None) -> None:
        if spec != self._spec:
            self.end()

    def end(self) -> None:
        self._spec = self._cluster = None
        self._open.close()


KEEPER = pytest.StashKey[Keeper]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[KEEPER] = Keeper()
    warm_start.begin()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let modules of equal specs follow each other."""
    places = [at for at, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    first: dict[str, int] = {}
    for at in places:
        first.setdefault(_group(items[at]), at)
    ours = sorted((items[at] for at in places), key=lambda item: first[_group(item)])
    for at, item in zip(places, ours, strict=True):
        items[at] = item


def _group(item: pytest.Item) -> str:
    spec = _spec(item)
    return str(item.path) if spec is None else repr(spec)


def _spec(item: pytest.Item | None) -> Spec | None:
    found = getattr(getattr(item, "module", None), "SPEC", None)
    return found if isinstance(found, Spec) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    try:
        return (yield)
    finally:
        item.config.stash[KEEPER].end_unless(_spec(nextitem))


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    return request.config.stash[KEEPER].cluster(request.module.SPEC)


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
