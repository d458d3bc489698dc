"""A file that cannot be read is one clear error that names it once, whoever reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay.bench import trace
from kvrelay.cli.eval_answers import read_earlier
from kvrelay.cli.generate import build_request
from kvrelay.cli.parser import build_parser
from kvrelay.core.errors import InvalidRequestError, ModelLoadError, ServeError, SettingsError
from kvrelay.core.text_file import read_text
from kvrelay.model.checkpoint_files import CheckpointFiles
from kvrelay.model.config import load_config
from kvrelay.model.embedded_path import embedded_checkpoint
from kvrelay.router.model_files import read_model_files
from kvrelay.router.tenants import Tokens


def test_the_text_of_a_file_is_returned_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("grüße\n", encoding="utf-8")

    assert read_text(tmp_path / "f", SettingsError) == "grüße\n"


def test_bytes_that_are_no_text_are_named_by_their_place(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"ab\xff")

    with pytest.raises(SettingsError, match=f"^{tmp_path / 'f'}: is not UTF-8: .* at byte 2$"):
        read_text(str(tmp_path / "f"), SettingsError)


def generate(path: Path) -> object:
    return build_request(build_parser().parse_args(["generate", "--prompt-file", str(path)]))


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (generate, InvalidRequestError),
        (lambda path: read_earlier(str(path)), InvalidRequestError),
        (trace.read, InvalidRequestError),
        (lambda path: Tokens.load(str(path)), SettingsError),
        (lambda path: load_config(path.parent), ModelLoadError),
        (lambda path: read_model_files(path.parent), ModelLoadError),
    ],
    ids=["prompt", "earlier result", "trace", "token file", "config of a node", "config of a router"],
)
def test_a_missing_file_is_named_once(tmp_path: Path, read: Callable[[Path], object], error: type[ServeError]) -> None:
    missing = tmp_path / "config.json"

    with pytest.raises(error) as caught:
        read(missing)

    assert str(caught.value).count(str(tmp_path)) == 1
    assert str(caught.value).endswith("No such file or directory")


def test_a_weight_file_that_leads_nowhere_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("gone")

    with pytest.raises(ModelLoadError) as caught:
        CheckpointFiles(tmp_path, load_config(embedded_checkpoint()))

    assert str(caught.value) == f"{tmp_path / 'model.safetensors'}: cannot be read: No such file or directory"
