from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrelay.bench import report


def test_the_ratio_is_the_median_of_pairs_not_the_ratio_of_medians() -> None:
    found = report.paired([1.0, 2.0, 30.0], [1.0, 1.0, 10.0])

    assert found["ratio_median"] == 2.0
    assert (found["ours_median_ms"], found["baseline_median_ms"]) == (2000.0, 1000.0)


def test_unpaired_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        report.paired([1.0, 2.0], [1.0])


def test_benches_of_one_day_share_a_file_that_names_machine_versions_and_date(tmp_path: Path) -> None:
    report.write(tmp_path, device="cpu", bench="handoff", result={"a": 1})
    file = report.write(tmp_path, device="cpu", bench="stream", result={"b": 2})

    content = json.loads(file.read_text())
    assert content["results"] == {"handoff": {"a": 1}, "stream": {"b": 2}}
    assert file.name == f"cpu-{content['date']}.json"
    assert content["machine"]["cores"] >= 1
    assert "torch" in content["versions"]
