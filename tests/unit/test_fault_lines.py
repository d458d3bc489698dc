"""Every line of the list of production faults has a test of its name, and the table beside them names real ones."""

from __future__ import annotations

import re

import pytest

from repo import ROOT

LINES = {"P": 11, "F": 6, "C": 8, "R": 5, "I": 8, "O": 3, "L": 3, "A": 4, "N": 7}  # of the list, by its parts
IDS = [f"{part}{number}" for part, count in LINES.items() for number in range(1, count + 1)]
TABLE = (ROOT / "tests" / "faults" / "README.md").read_text()
NAMES = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
}
# R1 is a file of its own; N4's idle use and L1's values are named in the table by their files.
BY_FILE = {"R1"}


def rows(line: str) -> list[str]:
    return [row for row in TABLE.splitlines() if row.startswith(f"| {line} |")]


@pytest.mark.parametrize("line", IDS)
def test_every_line_has_a_test_that_bears_its_name(line: str) -> None:
    named = [name for name in NAMES if re.search(rf"_{line.lower()}(_|$)", name)]

    assert named or line in BY_FILE, f"no test_{line.lower()}_..."


@pytest.mark.parametrize("line", IDS)
def test_the_table_names_tests_and_files_that_exist(line: str) -> None:
    assert rows(line), f"{line} is not in tests/faults/README.md"
    for row in rows(line):
        for name in re.findall(r"`(test_\w+?)_?…?`", row):
            assert any(one.startswith(name) for one in NAMES), f"{line}: no {name}"
        for file in re.findall(r"`(tests/[\w/]+\.py)`", row):
            assert (ROOT / file).exists(), f"{line}: no {file}"


def test_the_table_has_no_other_lines() -> None:
    assert set(re.findall(r"^\| ([A-Z]\d+) \|", TABLE, re.MULTILINE)) == set(IDS)
