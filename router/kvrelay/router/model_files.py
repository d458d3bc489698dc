"""What the router needs of a checkpoint folder: names, limits, tokenizer and chat template. No weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvrelay.core.errors import ModelLoadError
from kvrelay.core.text_file import read_text

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """One checkpoint, as far as text and limits go. Read by `read_model_files`."""

    name: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    add_bos: bool  # text prompts begin with bos_token
    special_tokens: dict[str, str]  # bos_token and the like -> text, for templates
    chat_template: str | None


def read_model_files(folder: Path, *, name: str = "") -> ModelFiles:
    """Read a Hugging Face folder; `name` defaults to the folder's.

    Raises:
        ModelLoadError: a file is missing or damaged; names it.
    """
    config = _read_json(folder / "config.json", required=True)
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    return ModelFiles(
        name=name or folder.resolve().name,
        vocab_size=_count(config, "vocab_size", folder),
        max_position_embeddings=_count(config, "max_position_embeddings", folder),
        eos_token_ids=_eos_token_ids(folder, config),
        tokenizer=_tokenizer(folder / "tokenizer.json"),
        add_bos=bool(tokenizer_config.get("add_bos_token", False)),
        special_tokens=_special_tokens(tokenizer_config),
        chat_template=_chat_template(folder, tokenizer_config),
    )


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        value = json.loads(read_text(path, ModelLoadError))
    except ValueError as err:
        raise ModelLoadError(f"{path}: is not JSON: {err}") from err
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: is a {type(value).__name__}, not an object")
    return value


def _count(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"{folder / 'config.json'}: {key} is {value!r}; it must be a whole number of at least 1")
    return value


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the end tokens that generation_config.json names, else config.json's."""
    value = _read_json(folder / "generation_config.json").get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) for one in ids):
        raise ModelLoadError(f"{folder}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return tuple(ids)


def _tokenizer(path: Path) -> Tokenizer | None:
    if not path.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as err:  # the library raises bare Exception, nothing narrower
        raise ModelLoadError(f"{path}: is no tokenizer: {err}") from err
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = tokenizer_config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """Return the template's text; a file of its own goes before the one in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path, ModelLoadError)
    value = tokenizer_config.get("chat_template")
    if isinstance(value, list):  # several by name
        value = next((one.get("template") for one in value if one.get("name") == "default"), None)
    if value is not None and not isinstance(value, str):
        raise ModelLoadError(f"{folder / 'tokenizer_config.json'}: chat_template is a {type(value).__name__}")
    return value
