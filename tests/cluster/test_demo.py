"""The demo leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest


def test_a_demo_that_is_stopped_takes_its_cluster_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where its logs go
    with subprocess.Popen([sys.executable, "-m", "kvrelay.cli.demo"], stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if "router ready" in line:
                break
        cluster = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGTERM)
        demo.stderr.read()

    assert demo.returncode == 143
    assert len(cluster) > 1
    assert not any(one.is_running() for one in cluster)
