"""What the README shows can be typed in."""

from __future__ import annotations

import ast
import re
import shlex

import pytest

from command_line import ROLES
from kvrelay.cli.client import SERVICE_CONFIG
from kvrelay.cli.parser import build_parser
from kvrelay.core.settings import load
from kvrelay.proto.v1 import fleet_pb2, inference_pb2
from repo import ROOT, pyproject

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
SHELL = "\n".join(text for language, text in BLOCKS if language == "sh").replace("\\\n", " ")
COMMANDS = [line for line in SHELL.splitlines() if "kvrelay" in line.split("#")[0] and "grpcurl" not in line]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_ones_that_exist(line: str) -> None:
    words = shlex.split(line, comments=True)
    at = next(place for place, word in enumerate(words) if word.endswith(("kvrelay", "kvrelay.cli.main")))
    command, *options = words[at + 1 :]

    if command in ROLES:
        assert load(ROLES[command], options, prog=command, environ={}).index_url == "redis://db:6379/0"
    else:
        assert build_parser().parse_args([command, *options]).command == command


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for text in (README, (ROOT / "docs" / "development.md").read_text()):
        for target in re.findall(r"^make ([a-z-]+)", text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_grpcurl_lines_name_methods_that_exist() -> None:
    methods = {
        f"kvrelay.v1.{service.name}/{method.name}"
        for file in (inference_pb2, fleet_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    named = set(re.findall(r"kvrelay\.v1\.\w+/\w+", SHELL))

    assert named
    assert named <= methods


def test_the_python_client_is_valid_and_has_the_retry_policy_of_ours() -> None:
    [client] = [text for language, text in BLOCKS if language == "python"]
    tree = ast.parse(client)
    [retry] = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and "retry" in ast.unparse(node.targets[0])
    ]

    assert ast.literal_eval(retry) == SERVICE_CONFIG


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_first_line_says_what_fits() -> None:
    assert "fit" in README.splitlines()[0]
    assert pyproject()["project"]["readme"] == "README.md"
