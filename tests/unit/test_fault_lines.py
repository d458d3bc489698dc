"""Every line of the list of production faults has a test of its own and a breakage that the test must notice."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from faults.lab.sabotages import SABOTAGES
from repo import ROOT

README = (ROOT / "tests" / "faults" / "README.md").read_text()
LISTED = ROOT.parent / "shared" / "design" / "FAULTS.md"
LINES = tuple(
    f"{letter}{number}"
    for letter, first, last in (
        ("P", 1, 11), ("F", 1, 6), ("C", 1, 8), ("R", 2, 5), ("L", 1, 3), ("A", 1, 4), ("N", 1, 7),
    )
    for number in range(first, last + 1)
)  # fmt: skip
# Measured against, and noticed by no test; see where it is defined.
NO_BREAKAGE = {"safety_off"}


@dataclass(frozen=True, slots=True)
class Found:
    """A test function."""

    name: str
    says: frozenset[str]  # lines that its name or docstring carries
    breakages: frozenset[str]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table."""

    line: str
    tests: tuple[str, ...]  # names; … stands for any letters
    breakages: tuple[str, ...]


@cache
def all_tests() -> tuple[Found, ...]:
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                named = re.findall(r"(?:^|_)([pfcrlan]\d+)(?=_)", node.name.removeprefix("test"))
                told = re.findall(r"\b([PFCRLAN]\d+)\b", ast.get_docstring(node) or "")
                breakages = frozenset(name for one in node.decorator_list for name in _sabotage(one))
                found.append(Found(node.name, frozenset([*(one.upper() for one in named), *told]), breakages))
    return tuple(found)


def _sabotage(decorator: ast.expr) -> list[str]:
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.sabotage":
        return [ast.literal_eval(one) for one in decorator.args]
    return []


@cache
def rows() -> tuple[Row, ...]:
    found = []
    for line, tests, breakages in re.findall(r"^\| ([A-Z]\d+|-) \| (.*?) \| (.*?) ?\|$", README, re.MULTILINE):
        names = tuple(
            name for name in re.findall(r"`([^`]+)`", tests) if re.match(r"(test|…)_", name) and "." not in name
        )
        found.append(Row(line, names, tuple(re.findall(r"`(\w+)`", breakages))))
    return tuple(found)


def meant_by(pattern: str) -> list[Found]:
    """Return the tests that a name of the table stands for."""
    wanted = re.compile(".*".join(map(re.escape, pattern.split("…"))))
    return [one for one in all_tests() if wanted.fullmatch(one.name)]


@pytest.mark.parametrize("line", LINES)
def test_a_line_has_a_test_that_carries_its_id_and_a_row_with_the_breakage_that_this_test_notices(line: str) -> None:
    carrying = [one for one in all_tests() if line in one.says]
    assert carrying, f"no test carries {line} in its name or docstring"
    assert any(one.breakages for one in carrying), f"no test of {line} has a breakage"

    of_line = [row for row in rows() if row.line == line]
    assert of_line, f"{line} has no row"
    if line == "C8":  # a property of other lines' tests, whose breakages are theirs
        return
    for row in of_line:
        meant = [one for pattern in row.tests for one in meant_by(pattern)]
        assert any(line in one.says for one in meant), f"{row.tests} are no tests of {line}"
        assert row.breakages, f"the row of {line} names no breakage"
        for breakage in row.breakages:
            assert breakage in SABOTAGES, f"{line}: there is no breakage {breakage}"
            assert any(breakage in one.breakages for one in meant), (
                f"{line}: no test of the row is broken by {breakage}"
            )


def test_each_name_in_the_table_is_that_of_a_test() -> None:
    assert [name for row in rows() for name in row.tests if not meant_by(name)] == []


def test_each_breakage_is_named_by_a_test_and_in_the_table() -> None:
    marked = {breakage for one in all_tests() for breakage in one.breakages}
    assert marked == SABOTAGES.keys() - NO_BREAKAGE
    assert marked <= {breakage for row in rows() for breakage in row.breakages} | _without_a_line()


@pytest.mark.parametrize("breakage", sorted(SABOTAGES))
def test_a_breakage_replaces_what_is_there(breakage: str) -> None:
    for change in SABOTAGES[breakage]:
        owner: Any = import_module(f"kvrelay.{change.module}")
        for name in change.path.split("."):
            owner = getattr(owner, name)


def _without_a_line() -> set[str]:
    """Return the breakages of tests that belong to no line of the list."""
    return {breakage for one in all_tests() if not one.says for breakage in one.breakages}


@pytest.mark.skipif(not LISTED.exists(), reason="the list itself is not in the repository, and is not beside it here")
def test_the_lines_are_those_of_the_list() -> None:
    listed = set(re.findall(r"^([PFCRLAN]\d+) ", Path(LISTED).read_text(), re.MULTILINE))
    assert listed == set(LINES) | {"R1"}  # whose test restarts plain processes, which nothing can break
