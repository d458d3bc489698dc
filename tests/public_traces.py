"""Public request traces, where they lie beside the repository."""

from __future__ import annotations

import pytest

from kvrelay.bench.trace import Trace, read
from repo import ROOT

_FOLDER = ROOT.parent / "shared" / "traces"


def public_trace(name: str) -> Trace:
    """Read a trace, or skip the test that asks for it where there are none."""
    if not _FOLDER.exists():
        pytest.skip("no traces beside the repository")
    return read(_FOLDER / f"{name}.jsonl.gz")
