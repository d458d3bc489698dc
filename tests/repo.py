"""The repository as the tests of its shape see it."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def child_path() -> str:
    """Return the PYTHONPATH of a child process: it finds these tests, and the product where this process does."""
    return os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def roots() -> list[str]:
    """Return the top folders that hold a portion of the namespace, as the build configuration lists them."""
    listed: list[str] = pyproject()["tool"]["hatch"]["build"]["dev-mode-dirs"]
    return listed


def sources() -> list[Path]:
    """Return every Python file of the product, generated ones left out."""
    files = (path for root in roots() for path in (ROOT / root / "kvrelay").rglob("*.py"))
    return sorted(path for path in files if not path.stem.endswith(("_pb2", "_pb2_grpc")))


def module_name(path: Path) -> str:
    """Return the dotted name under which a product file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def checked_in(pattern: str) -> list[Path]:
    """Return the files of the working tree that match and are not ignored by git, or all that match outside git."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", pattern], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        return [path for path in ROOT.rglob(pattern.rsplit("/", 1)[-1]) if ".venv" not in path.parts]
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]
