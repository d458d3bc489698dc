"""Faults: one lab cluster for all tests of a session, and deliberate breakages that each test must notice.

A test names its breakage with `@pytest.mark.sabotage("name")`. `--sabotage` runs every test with its breakage and
passes when the test fails; without it the tests run as they are, and with FAULTS_SEED in the environment a sixth of
the breakages, chosen by that number, as well.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import cast

import pytest

import warm_start
from faults.lab import sabotages
from faults.lab.fleet import Fleet, LabKeeper
from faults.lab.workload import SPEC

SEED = os.environ.get("FAULTS_SEED")
SETTLE_S = 15.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sabotage", action="store_true", help="run every fault test with its breakage; it must fail")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sabotage(name): the breakage that this test must notice")
    warm_start.begin()


def pytest_report_header() -> str:
    return f"faults: breakages of this run chosen by FAULTS_SEED={SEED}" if SEED else "faults: no breakages in this run"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("sabotage")
    if mark is not None and "sabotaged" in metafunc.fixturenames:
        breakage = pytest.param(mark.args[0], id=f"sabotaged:{mark.args[0]}")
        metafunc.parametrize("sabotaged", [pytest.param(None, id="whole"), breakage], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    everything = config.getoption("--sabotage", default=False)
    ours = [item for item in items if item.get_closest_marker("sabotage")]
    broken = [item for item in ours if _breakage(item)]
    if everything:
        unwanted = {id(item) for item in items if item not in broken}
    elif SEED is None:
        unwanted = {id(item) for item in broken}
    else:
        names = sorted({item.nodeid for item in broken if not item.get_closest_marker("full")})
        lot = set(names[int(SEED) % 6 :: 6])  # numbers that follow each other take turns
        unwanted = {id(item) for item in broken if item.nodeid not in lot and not item.get_closest_marker("full")}
    items[:] = [item for item in items if id(item) not in unwanted]


def _breakage(item: pytest.Item) -> str | None:
    spec = getattr(item, "callspec", None)
    return None if spec is None else spec.params.get("sabotaged")


@pytest.fixture(scope="session")
def _labs() -> Iterator[LabKeeper]:
    with LabKeeper(SPEC) as keeper:
        yield keeper


@pytest.fixture
def fleet(_labs: LabKeeper, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """The lab's cluster, whole and at rest before the test, and after it."""
    lab = _labs.lab
    yield lab
    if _breakage(request.node):
        _labs.heal_or_replace()  # what a breakage has lost is lost for good
    else:
        lab.make_whole(SETTLE_S)


@pytest.fixture(autouse=True)
def sabotaged(request: pytest.FixtureRequest) -> str | None:
    return getattr(request, "param", None)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    name = _breakage(pyfuncitem)
    if name is None:
        return (yield)
    lab = cast("Fleet | None", pyfuncitem.funcargs.get("fleet"))
    sabotages.apply(name)
    if lab is not None:
        lab.remote.sabotage(name)
    try:
        yield
    except (Exception, pytest.fail.Exception) as err:
        words = str(err).splitlines() or [type(err).__name__]
        pyfuncitem.add_report_section("call", "sabotage", f"{name} was noticed: {type(err).__name__}: {words[0][:200]}")
        return True
    finally:
        sabotages.undo()
        if lab is not None:
            lab.remote.heal()
    pytest.fail(f"the breakage {name!r} went unnoticed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    lab = getattr(item, "funcargs", {}).get("fleet")
    if report.failed and lab is not None and lab.local.log.exists():  # not of one that was replaced meanwhile
        report.sections.append(("cluster", lab.logs()))
    return report
