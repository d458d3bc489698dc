"""Prints what an image installs before the package itself, so that a change of code rebuilds one small layer only.

Usage: python3 compose/requirements.py EXTRAS, with the names of extras between commas.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    """Return the package's requirements with these extras."""
    found = tomllib.loads(Path("pyproject.toml").read_text())
    optional = found["project"]["optional-dependencies"]
    return [
        *found["project"]["dependencies"],
        *(requirement for extra in extras for requirement in optional[extra]),
    ]


if __name__ == "__main__":
    wanted = requirements([extra for extra in sys.argv[1].split(",") if extra])
    sys.stdout.write("\n".join(wanted) + "\n")
