"""A library that kernels can do without is passed over, with the reason, where it is missing or does not load."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.kernels.optional import import_refuses


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_what_loads_is_not_refused() -> None:
    assert import_refuses("json.decoder", "json") is None


def test_what_is_missing_is_named_as_a_user_would_install_it(packages: Path) -> None:
    (packages / "older_kvr").mkdir()
    (packages / "older_kvr" / "__init__.py").touch()

    assert import_refuses("absent_kvr.part", "absent-kvr") == "package absent-kvr is not installed"
    assert import_refuses("older_kvr.newer_part", "newer-kvr") == "package newer-kvr is not installed"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import its_own_need_kvr", "No module named 'its_own_need_kvr'"),
        ("import ctypes; ctypes.CDLL('libabsent_kvr.so')", "libabsent_kvr.so"),
        ("raise RuntimeError('built for another device')", "built for another device"),
        ("raise TypeError('another library is not as expected')", "another library is not as expected"),
    ],
    ids=["needs_another", "library", "own_check", "check_of_others"],
)
def test_what_is_installed_and_does_not_load_is_refused_with_the_reason(
    packages: Path, body: str, reason: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"half_{request.node.callspec.id}_kvr"
    (packages / f"{name}.py").write_text(body)

    why = import_refuses(name, "half")

    assert why is not None
    assert why.startswith("package half does not load: ")
    assert reason in why
    assert why in caplog.text
