"""Checkpoint folders as a router reads them, chat templates, and prompts to ids."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from kvrelay.core.errors import InvalidRequestError, ModelLoadError
from kvrelay.model.embedded_path import embedded_checkpoint
from kvrelay.router.chat import ChatTemplate
from kvrelay.router.model_files import read_model_files
from kvrelay.router.tokenizer import PromptTokenizer, longest_token

CONFIG = {"vocab_size": 10, "max_position_embeddings": 128, "eos_token_id": 1}
WORDS = {"<s>": 0, "</s>": 1, "hello": 2, "world": 3, "user": 4, "assistant": 5, "?": 6}
TEMPLATE = (
    "{{ bos_token }} {% for message in messages %}\n"
    "    {% if message.role not in ['user', 'assistant'] %}{{ raise_exception('role ' + message.role) }}{% endif %}\n"
    "{{ message.role }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def a_folder(path: Path, *, tokenizer: bool = True, adds_bos: bool = False, **tokenizer_config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(CONFIG))
    if tokenizer:
        made = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made.add_special_tokens(["<s>", "</s>"])
        if adds_bos:
            made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        made.save(str(path / "tokenizer.json"))
        special = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
        (path / "tokenizer_config.json").write_text(json.dumps(special | tokenizer_config))
    return path


def a_tokenizer(path: Path, **options: Any) -> PromptTokenizer:
    return PromptTokenizer(read_model_files(a_folder(path, **options)))


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({}, [2, 3]),
        ({"add_bos_token": True}, [0, 2, 3]),
        ({"adds_bos": True}, [0, 2, 3]),
        ({"adds_bos": True, "add_bos_token": True}, [0, 2, 3]),
    ],
)
def test_a_text_begins_as_the_models_tokenizer_begins_one(
    tmp_path: Path, options: dict[str, Any], ids: list[int]
) -> None:
    assert a_tokenizer(tmp_path, **options).text("hello world").tolist() == ids


def test_a_chat_is_rendered_by_the_template_which_writes_the_special_tokens(tmp_path: Path) -> None:
    tokenizer = a_tokenizer(tmp_path, chat_template=TEMPLATE, adds_bos=True, add_bos_token=True)

    assert tokenizer.has_chat_template
    assert tokenizer.chat([("user", "hello"), ("assistant", "world"), ("user", "?")]).tolist() == [
        0,
        4,
        2,
        5,
        3,
        4,
        6,
        5,
    ]


def test_roles_that_the_template_does_not_know_are_refused(tmp_path: Path) -> None:
    tokenizer = a_tokenizer(tmp_path, chat_template=TEMPLATE)

    with pytest.raises(InvalidRequestError, match="role wizard"):
        tokenizer.chat([("wizard", "hello")])


def test_a_long_chat_that_is_refused_names_each_role_once(tmp_path: Path) -> None:
    tokenizer = a_tokenizer(tmp_path, chat_template=TEMPLATE)
    messages = ((role, "hello") for _ in range(1000) for role in ("user", "wizard"))

    with pytest.raises(InvalidRequestError, match="messages of roles user, wizard: "):
        tokenizer.chat(messages)


def test_a_chat_without_a_template_and_a_text_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        a_tokenizer(tmp_path).chat([("user", "hello")])
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        a_tokenizer(bare, tokenizer=False).text("hello")


def test_a_text_that_cannot_fit_is_refused_unread() -> None:
    tokenizer = PromptTokenizer(read_model_files(embedded_checkpoint()))
    longest = longest_token(Tokenizer.from_file(str(embedded_checkpoint() / "tokenizer.json")))
    fits = "x" * (64 * longest)

    assert longest == 40  # a line's end and 19 spaces, which are two bytes each in the vocabulary
    assert len(tokenizer.text(fits, max_tokens=64)) > 64, "by its size it might have fitted: the caller counts"
    with pytest.raises(InvalidRequestError, match="2561 bytes of text, more than 64 tokens of at most 40 bytes"):
        tokenizer.text(fits + "x", max_tokens=64)
    with pytest.raises(InvalidRequestError, match="more than 64 tokens"):
        tokenizer.chat([("user", fits)], max_tokens=64)


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": normalizers.Strip()},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {
            "pre_tokenizer": pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        },
        {"model": models.WordLevel(WORDS, unk_token="?")},
        {"model": models.BPE({"a": 0}, [])},
    ],
)
def test_no_size_is_refused_where_a_token_may_stand_for_any_text(part: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_file(str(embedded_checkpoint() / "tokenizer.json"))
    assert longest_token(tokenizer)
    for name, value in part.items():
        setattr(tokenizer, name, value)

    assert longest_token(tokenizer) == 0


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    tokenizer = PromptTokenizer(read_model_files(embedded_checkpoint()))
    text = "the with statement " * 50_000
    with ThreadPoolExecutor(1) as pool:
        began_s = time.perf_counter()
        work = pool.submit(tokenizer.text, text)
        longest_s, last_s = 0.0, began_s
        while not work.done():
            time.sleep(0.001)
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s

    assert longest_s < (last_s - began_s) / 2, "else all of a router's requests stop with it"


def test_templates_find_what_publishers_use() -> None:
    template = ChatTemplate(
        "{%- for m in messages -%}{%- if loop.index > 1 -%}{%- break -%}{%- endif -%}{{ m | tojson }}{%- endfor -%}"
        "{% generation %}<{{ strftime_now('%Y')|length }}>{% endgeneration %}",
        {},
    )

    assert template.render([("user", "<é>"), ("user", "b")]) == '{"role": "user", "content": "<é>"}<4>'


def test_a_template_cannot_leave_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})

    with pytest.raises(InvalidRequestError, match="refuses"):
        template.render([("user", "x")])


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ("plain", "plain"),
        (None, None),
    ],
)
def test_the_template_comes_from_the_tokenizers_config(tmp_path: Path, given: Any, found: str | None) -> None:
    assert read_model_files(a_folder(tmp_path, chat_template=given)).chat_template == found


def test_a_template_file_goes_before_the_tokenizers_config(tmp_path: Path) -> None:
    (a_folder(tmp_path, chat_template="old") / "chat_template.jinja").write_text("new")

    assert read_model_files(tmp_path).chat_template == "new"


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert read_model_files(a_folder(tmp_path)).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 6]}')

    assert read_model_files(tmp_path).eos_token_ids == (1, 6)


def test_the_name_is_the_folders_unless_given(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    a_folder(folder)

    assert read_model_files(folder).name == "my-model"
    assert read_model_files(folder, name="other").name == "other"


@pytest.mark.parametrize(
    ("file", "text", "word"),
    [
        ("config.json", None, "config.json"),
        ("config.json", "{", "config.json"),
        ("config.json", "[]", "not an object"),
        ("config.json", '{"vocab_size": "x"}', "vocab_size"),
        ("tokenizer.json", "{}", "no tokenizer"),
        ("tokenizer_config.json", "nope", "tokenizer_config.json"),
    ],
)
def test_a_damaged_folder_is_refused_by_file(tmp_path: Path, file: str, text: str | None, word: str) -> None:
    a_folder(tmp_path)
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(text)

    with pytest.raises(ModelLoadError, match=word):
        read_model_files(tmp_path)
    shutil.rmtree(tmp_path)


def test_a_template_with_a_syntax_error_stops_the_start() -> None:
    with pytest.raises(ModelLoadError, match="line 2"):
        ChatTemplate("a\n{% if %}", {})
