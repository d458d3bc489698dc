"""The command line is an interface: it changes on purpose, together with its golden file and the README."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from command_line import GOLDEN, describe, readme_table, settings_table
from kvrelay.cli.generate import build_request
from kvrelay.cli.main import main
from kvrelay.cli.option_types import endpoint, positive_seconds, seconds
from kvrelay.cli.parser import build_parser
from kvrelay.core.errors import InvalidRequestError
from kvrelay.proto.convert import unpack_ids

MAY_BE_0 = {"watch_s", "down_s", "stale_s", "alone_s"}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvrelay.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_the_command_line_is_the_golden_one() -> None:
    assert describe() == GOLDEN.read_text(), "changed on purpose? python tests/command_line.py"


def test_the_readme_lists_every_setting() -> None:
    assert readme_table() == settings_table(), "changed on purpose? python tests/command_line.py"


def test_help_and_version_answer_at_once() -> None:
    took_s = []
    for _ in range(3):  # the least of some: others on this machine only ever add
        began_s = time.perf_counter()
        shown = run("--help")
        took_s.append(time.perf_counter() - began_s)
        assert shown.returncode == 0
        assert "generate" in shown.stdout

    assert min(took_s) < 2.0
    assert run("--version").stdout.strip() == f"kvrelay {version('kvrelay')}"


def test_help_loads_no_heavy_library() -> None:
    code = (
        "import sys\nfrom kvrelay.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(str({'torch', 'grpc', 'rich', 'numpy', 'pydantic'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stderr.strip() == ""


def test_generate_takes_exactly_one_prompt() -> None:
    for args in (["generate"], ["generate", "text", "--prompt-file", "f"], ["generate", "--token-ids", "a", "text"]):
        with pytest.raises(SystemExit, match="2"):
            main(args)


def test_token_ids_travel_unchanged(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps([0, 5, 2**31 - 1]))

    request = build_request(build_parser().parse_args(["generate", "--token-ids", str(tmp_path / "ids.json")]))

    assert unpack_ids(request.tokens.packed_ids).tolist() == [0, 5, 2**31 - 1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1, 2", "not JSON"),
        ('{"ids": [1]}', "not a JSON list"),
        ("[1, true]", "not a JSON list"),
        ("[1, 2.5]", "not a JSON list"),
        ("[1, -3]", "token id -3"),
        ("[4294967296]", "token id 4294967296"),
    ],
)
def test_a_file_that_holds_no_token_ids_is_refused_with_its_name(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "ids.json"
    file.write_text(content)

    with pytest.raises(InvalidRequestError, match=words) as caught:
        build_request(build_parser().parse_args(["generate", "--token-ids", str(file)]))

    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "option", [("--max-tokens", "-1"), ("--seed", "-1"), ("--seed", "18446744073709551616"), ("--logprobs", "-1")]
)
def test_numbers_that_cannot_be_sent_are_refused_by_name(option: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match=f"{option[0]} {option[1]}"):
        build_request(build_parser().parse_args(["generate", "text", *option]))


@pytest.mark.parametrize("option", [("--logprobs", "3"), ("--prompt-logprobs",)])
def test_what_only_json_shows_is_refused_without_it(option: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequestError, match=f"{option[0]} shows nothing without --json"):
        build_request(build_parser().parse_args(["generate", "text", *option]))

    assert build_request(build_parser().parse_args(["generate", "text", *option, "--json"]))


@pytest.mark.parametrize("text", ["nonsense", "host:", ":8400", "host:0", "host:99999", "host:84x", "http://host:80"])
def test_an_endpoint_that_is_none_is_refused_with_its_limit(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", "text", "--endpoint", text], ["health", text], ["bench", "load", "--endpoint", text]):
        with pytest.raises(SystemExit, match="2"):
            main(command)

        assert f"{text!r} is not HOST:PORT with a port from 1 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["localhost:1", "[::1]:8400", "ipv4:10.0.0.1:8400,10.0.0.2:8400", "dns:///router"])
def test_endpoints_are_all_that_grpc_connects_to(text: str) -> None:
    assert build_parser().parse_args(["nodes", "--endpoint", text]).endpoint == text


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "4294968", "soon"])
def test_a_time_limit_that_is_none_is_refused_with_its_limit(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "text", "--timeout-s", text])

    assert f"--timeout-s: {text!r} is not a time above 0 and up to 4294967 s" in capsys.readouterr().err


def test_every_endpoint_and_every_time_is_judged() -> None:
    for name, action in options_of("kvrelay", build_parser()):
        if action.dest == "endpoint":
            assert action.type is endpoint, name
        if action.dest.endswith("_s") or action.dest == "seconds":
            assert action.type is (seconds if action.dest in MAY_BE_0 else positive_seconds), name


def options_of(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from options_of(f"{name} {word}", inner)
        yield f"{name} {action.dest}", action


def test_a_system_message_makes_a_chat() -> None:
    request = build_request(build_parser().parse_args(["generate", "hello", "--system", "be brief"]))

    assert [(one.role, one.content) for one in request.chat.messages] == [("system", "be brief"), ("user", "hello")]


def test_unset_sampling_options_stay_unset_on_the_wire() -> None:
    sampling = build_request(build_parser().parse_args(["generate", "text"])).sampling

    assert not any(sampling.HasField(name) for name in ("top_p", "seed", "logprobs", "repetition_penalty"))


def test_a_missing_prompt_file_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = run("generate", "--prompt-file", str(tmp_path / "none.txt"))

    assert done.returncode == 1
    assert done.stderr.startswith("kvrelay: error: ")
    assert len(done.stderr.splitlines()) == 1


def test_nobody_listening_is_one_status_line_and_exit_code_1() -> None:
    done = run("generate", "hello", "--endpoint", "127.0.0.1:1", "--timeout-s", "5")

    assert done.returncode == 1
    assert done.stderr.startswith("UNAVAILABLE: ")
    assert done.stdout == ""


def test_a_reader_that_leaves_early_is_no_traceback(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvrelay.cli.main", "certs", str(tmp_path)],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        os.close(writer)

    assert (done.returncode, done.stderr) == (141, "")


def test_the_settings_table_says_what_each_role_means() -> None:
    [row] = [line for line in settings_table().splitlines() if line.startswith("| `model` |")]

    assert "router: checkpoint folder, only its small JSON files are read" in row
    assert "prefill, decode: checkpoint folder in the Hugging Face layout" in row
