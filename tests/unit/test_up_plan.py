"""What `up` starts, and how often it starts it again."""

from __future__ import annotations

import errno
import socket
import tempfile
from pathlib import Path

import pytest

from kvrelay.cli.children import RestartBudget
from kvrelay.cli.main import main
from kvrelay.cli.parser import build_parser
from kvrelay.cli.up import UpPlan, commands_of, plan_of
from kvrelay.core.errors import SettingsError


def a_plan(*args: str) -> UpPlan:
    return plan_of(build_parser().parse_args(["up", "--model", "somewhere", *args]))


def test_ring_sizes_are_dealt_out_in_turn() -> None:
    assert a_plan().ring_sizes == (2,)
    assert a_plan("--ring-size", "1,3").ring_sizes == (1, 3)
    assert a_plan("--ring-size", "1,3", "--prefill", "3").ring_sizes == (1, 3, 1)


def test_threads_of_all_computing_processes_fit_the_cores() -> None:
    plan = a_plan("--ring-size", "1,2", "--decode", "2")

    assert plan.num_computing == 5
    assert [plan.threads(num_cores) for num_cores in (1, 4, 5, 9, 10)] == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("args", [("--index", "memcached://x"), ("--listen", "8400"), ("--listen", "host:99999")])
def test_a_wrong_option_is_refused_by_name(args: tuple[str, str]) -> None:
    with pytest.raises(SettingsError, match=f"{args[0]} .*{args[1]}"):
        a_plan(*args)


def test_no_ring_size_is_dropped() -> None:
    with pytest.raises(SettingsError, match="'1,3' names 2 rings, --prefill 1"):
        a_plan("--ring-size", "1,3", "--prefill", "1")


@pytest.mark.parametrize("text", ["0", "1,,2", "-1", "two", "1.5"])
def test_a_ring_size_is_a_list_of_whole_numbers(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["up", "--ring-size", text])

    assert "is not a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("KVRELAY_ROUTER_MAX_RETRIES", "11", "a whole number of at least 0 and of at most 10"),
        ("KVRELAY_PREFILL_POOL_PAGES", "abc", "a whole number of at least 0"),
        ("KVRELAY_DECODE_LOG_LEVEL", "loud", "one of debug, info, warning, error"),
    ],
)
def test_a_wrong_variable_of_a_role_is_refused_before_anything_starts(
    name: str, value: str, allowed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)

    assert main(["up", "--model", "nowhere"]) == 1

    [line] = capsys.readouterr().err.splitlines()
    assert f"{name}: {value!r} is not {allowed} (" in line


def test_a_ring_of_more_ranks_than_there_can_be_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["up", "--model", "nowhere", "--ring-size", "1,65"]) == 1

    assert "--ring-size: '65' is not a whole number of at least 1 and of at most 64" in capsys.readouterr().err


def test_every_process_has_its_own_name_and_log() -> None:
    commands = commands_of(
        a_plan("--ring-size", "1,3", "--decode", "2"), index_url="redis://h:1", num_cores=2, run_folder=Path("logs")
    )

    assert [command.name for command in commands] == ["router", "prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert len({command.log for command in commands}) == 5


@pytest.mark.parametrize(
    ("rings", "num_gpus", "devices"),
    [
        ("1", 0, [None, None, None, None]),
        ("1", 1, [None, None, None, None]),
        ("1", 2, [None, "cuda:0", "cuda:1", "cuda:0"]),
        ("1", 4, [None, "cuda:0", "cuda:1", "cuda:2"]),
        ("2", 2, [None, None, "cuda:0", "cuda:1"]),
        ("2", 4, [None, None, "cuda:2", "cuda:3"]),
    ],
)
def test_nodes_of_one_process_take_the_gpus_behind_those_of_the_ring(
    rings: str, num_gpus: int, devices: list[str | None]
) -> None:
    plan = a_plan("--ring-size", rings, "--decode", "2")

    commands = commands_of(plan, index_url="redis://h:1", num_cores=2, run_folder=Path(), num_gpus=num_gpus)

    assert [next(iter(command.defaults.values()), None) for command in commands] == devices
    assert {name for one in commands for name in one.defaults} <= {"KVRELAY_PREFILL_DEVICE", "KVRELAY_DECODE_DEVICE"}


def test_names_differ_between_clusters_that_share_an_index() -> None:
    commands = commands_of(a_plan("--index", "redis://h:1"), index_url="redis://h:1", num_cores=2, run_folder=Path())

    assert all(socket.gethostname() in command.name for command in commands)


@pytest.mark.parametrize("who", ["", "me:secret@"])
def test_an_index_server_that_is_down_is_named_before_anything_starts(
    who: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where its logs would go
    with socket.socket() as taken:  # bound and not listening: a port that refuses
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        assert main(["up", "--index", f"redis://{who}{address}/3", "--listen", "127.0.0.1:0"]) == 1

    *said, error = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert error.startswith(f"kvrelay: error: redis://{address}/3 does not answer: index server: ")
    assert f"Error {errno.ECONNREFUSED}" in error


def test_a_port_in_use_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        assert main(["up", "--model", "somewhere", "--listen", address]) == 1

    assert capsys.readouterr().err == f"kvrelay: error: cannot listen on {address}: Address already in use\n"


def test_a_child_that_keeps_dying_waits_longer_each_time_and_then_stays_down() -> None:
    budget = RestartBudget(max_deaths=3, window_s=60, first_delay_s=0.5)

    assert [budget.delay_s(now_s) for now_s in (0.0, 1.0, 2.0, 3.0)] == [0.5, 1.0, 2.0, None]


def test_a_child_that_dies_rarely_is_always_restarted() -> None:
    budget = RestartBudget(max_deaths=1, window_s=60, first_delay_s=0.5)

    assert [budget.delay_s(now_s) for now_s in (0.0, 61.0, 122.0, 183.0)] == [0.5] * 4
