"""The tree: one namespace over many roots, each root known to every tool, everything in the wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from repo import ROOT, checked_in, module_name, pyproject, roots, sources

MAX_LINES = 350


def test_no_root_closes_the_namespace() -> None:
    """A single kvrelay/__init__.py hides all other roots from Python."""
    assert [str(path) for path in ROOT.glob("*/kvrelay/__init__.py")] == []
    assert not (ROOT / "kvrelay").exists()


def test_every_folder_with_a_portion_of_the_namespace_is_a_listed_root() -> None:
    found = {path.parent.name for path in ROOT.glob("*/kvrelay") if any(path.rglob("*.py"))}

    assert found <= set(roots())


def test_each_root_holds_one_package_of_its_own_name() -> None:
    for root in roots():
        inside = {path.name for path in (ROOT / root / "kvrelay").iterdir() if path.name != "__pycache__"}
        assert inside <= {root}, f"{root}/kvrelay holds {inside}"


@pytest.mark.parametrize("root", roots())
def test_each_root_is_known_to_every_tool(root: str) -> None:
    tool = pyproject()["tool"]

    assert f"{root}/kvrelay" in tool["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert root in tool["mypy"]["files"]
    assert f"$MYPY_CONFIG_FILE_DIR/{root}" in tool["mypy"]["mypy_path"].split(":")
    assert root in tool["ruff"]["src"]


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    [path] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    with zipfile.ZipFile(path) as wheel:
        return set(wheel.namelist())


def test_the_wheel_holds_every_module_and_nothing_at_namespace_level(wheel_files: set[str]) -> None:
    wanted = {module_name(path).replace(".", "/") + ".py" for path in sources() if path.name != "__init__.py"}

    assert wanted - wheel_files == set()
    assert "kvrelay/__init__.py" not in wheel_files


def test_the_wheel_holds_the_embedded_checkpoint_whole(wheel_files: set[str]) -> None:
    folder = ROOT / "model" / "kvrelay" / "model" / "embedded"
    wanted = {f"kvrelay/model/embedded/{path.relative_to(folder)}" for path in folder.rglob("*") if path.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name}

    assert {"config.json", "tokenizer.json"} <= {Path(name).name for name in wanted}
    assert wanted - wheel_files == set()


def test_the_wheel_holds_the_protocol_definitions(wheel_files: set[str]) -> None:
    protos = [path.name for path in (ROOT / "proto" / "kvrelay" / "proto" / "v1").glob("*.proto")]

    assert protos
    assert {f"kvrelay/proto/v1/{name}" for name in protos} <= wheel_files


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    written = [path for path in checked_in("*.py") if not path.stem.endswith(("_pb2", "_pb2_grpc"))]
    too_long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in written}

    assert {name: lines for name, lines in too_long.items() if lines > MAX_LINES} == {}
