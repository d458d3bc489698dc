"""`up` from the outside: what it prints, how it refuses, how it ends, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import warm_start
from cluster.cluster import wait_until
from kvrelay.bench import local_cluster
from oracle_data import oracle_folder, recording

ORACLE = "v3_dense"
FOLDER = oracle_folder(ORACLE)
# As users start it.
SMALL = {
    "OMP_NUM_THREADS": "1",
    warm_start.COLD_VARIABLE: "1",
    "KVRELAY_PREFILL_POOL_PAGES": "64",
    "KVRELAY_DECODE_POOL_PAGES": "64",
}
OPTIONS = ["--model", str(FOLDER), "--ring-size", "1", "--listen", "127.0.0.1:0"]


@pytest.fixture(autouse=True)
def _logs_go_with_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def up(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = local_cluster.start(OPTIONS, log=tmp_path / "up.log", environ=SMALL)
    yield process
    local_cluster.stop(process)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    top = psutil.Process(process.pid)
    return [top, *top.children(recursive=True)]


def gone(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


def cli(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvrelay.cli.main", *args]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, env={**os.environ, **SMALL}
    )


def test_up_prints_one_line_and_drains_on_sigterm(up: subprocess.Popen[str], tmp_path: Path) -> None:
    assert up.stdout is not None
    word, endpoint = up.stdout.readline().split()
    everyone = family(up)

    prompt = tmp_path / "ids.json"
    prompt.write_text(json.dumps(recording(ORACLE, 64).prompt))
    answer = cli("generate", "--token-ids", str(prompt), "--max-tokens", "24", "--endpoint", endpoint, "--json")
    up.send_signal(signal.SIGTERM)

    assert word == "ready"
    assert answer.returncode == 0, answer.stderr
    assert up.wait(timeout=45) == 0
    assert up.stdout.read() == ""
    assert "intra-op threads" in (tmp_path / "up.log").read_text()
    wait_until(lambda: gone(everyone), 20)


def test_nothing_outlives_up(up: subprocess.Popen[str]) -> None:
    assert up.stdout is not None
    up.stdout.readline()
    everyone = family(up)
    assert len(everyone) >= 5  # up, index server, router, prefill, decode

    up.kill()

    wait_until(lambda: gone(everyone), 20, lambda: str([one.cmdline() for one in everyone if one.is_running()]))


def test_up_stops_while_it_is_still_starting(up: subprocess.Popen[str], tmp_path: Path) -> None:
    wait_until(lambda: "intra-op threads" in (tmp_path / "up.log").read_text(), 30)

    up.send_signal(signal.SIGINT)

    assert up.wait(timeout=45) == 0


def a_copy(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    return folder


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_checkpoint_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = a_copy(tmp_path)
    (folder / missing).unlink()

    done = cli("up", "--model", str(folder), "--listen", "127.0.0.1:0")

    assert (done.returncode, done.stdout) == (1, "")
    assert missing in done.stderr
    assert "Traceback" not in done.stderr


def test_a_truncated_checkpoint_file_is_named(tmp_path: Path) -> None:
    folder = a_copy(tmp_path)
    os.truncate(folder / "model.safetensors", 5000)

    done = cli("up", "--model", str(folder), "--listen", "127.0.0.1:0")

    assert (done.returncode, done.stdout) == (1, "")
    assert "model.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_dtype_is_refused() -> None:
    done = cli("up", "--model", str(FOLDER), "--dtype", "int4")

    assert done.returncode == 2
    assert "int4" in done.stderr


def test_a_config_key_that_is_not_supported_is_named(tmp_path: Path) -> None:
    folder = a_copy(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 128}))

    done = cli("up", "--model", str(folder), "--listen", "127.0.0.1:0")

    assert done.returncode == 1
    assert "sliding_window" in done.stderr


def test_a_model_that_does_not_fit_is_refused_at_once_with_the_bytes() -> None:
    free = psutil.virtual_memory().available
    processes = free // 100_000 + 1  # a copy of these weights is larger than that

    done = cli("up", "--model", str(FOLDER), "--listen", "127.0.0.1:0", "--decode", str(processes))

    assert (done.returncode, done.stdout) == (1, "")
    assert "bytes" in done.stderr
    assert "free" in done.stderr


def test_an_unknown_setting_in_the_environment_is_named() -> None:
    command = [sys.executable, "-m", "kvrelay.cli.main", "up", *OPTIONS]
    environ = {**os.environ, **SMALL, "KVRELAY_DECODE_POOL_PAGE": "64"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environ)

    assert (done.returncode, done.stdout) == (1, "")
    assert "KVRELAY_DECODE_POOL_PAGE" in done.stderr


def test_nothing_runs_when_up_has_given_up() -> None:
    mark = f"TEST_MARK={os.urandom(8).hex()}"
    options = ["--model", str(FOLDER), "--ring-size", "2", "--listen", "127.0.0.1:0"]
    environ = {**os.environ, **SMALL, "KVRELAY_DECODE_DEVICE": "cuda:63", "TEST_MARK": mark.partition("=")[2]}
    command = [sys.executable, "-m", "kvrelay.cli.main", "up", *options]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environ)
    left = [one.cmdline() for one in psutil.process_iter() if mark in raw_environ(one)]

    assert left == []
    assert done.returncode == 1
    assert "cuda:63" in done.stderr


def raw_environ(process: psutil.Process) -> str:
    """Return a process's variables; nothing of one that has ended."""
    try:
        return Path(f"/proc/{process.pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        done = cli("up", "--model", str(FOLDER), "--listen", address)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [f"kvrelay: error: cannot listen on {address}: Address already in use"]
