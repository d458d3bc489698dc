"""The checkpoint that ships with the package: its size, its tokenizer and, with transformers, an answer."""

import re

import pytest
import torch
from tokenizers import Tokenizer

from kvrelay.core.types import Sampling
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.model.embedded_path import embedded_checkpoint
from kvrelay.model.single import SingleEngine
from kvrelay.router.model_files import read_model_files
from kvrelay.router.tokenizer import PromptTokenizer
from repo import ROOT


def test_the_folder_is_at_most_24_mib() -> None:
    assert sum(path.stat().st_size for path in embedded_checkpoint().iterdir()) <= 24 * 2**20


@pytest.mark.parametrize("text", ["a\n\tb  c", "Ünïcödé 🎉 漢字", "\x00\x7f", "code 48213.", ""])
def test_the_tokenizer_gives_any_text_back(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(embedded_checkpoint() / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_are_single_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(embedded_checkpoint() / "tokenizer.json"))
    assert tokenizer.encode(" 48213", add_special_tokens=False).tokens == ["Ġ", "4", "8", "2", "1", "3"]


def test_the_question_that_the_readme_shows_is_answered() -> None:
    [question] = re.findall(r'generate --chat "(.*?)"', (ROOT / "README.md").read_text())
    files, device = read_model_files(embedded_checkpoint()), torch.device("cpu")
    assert files.tokenizer is not None
    model = load_model(embedded_checkpoint(), dtype="float32", device=device, max_model_len=None)
    engine = SingleEngine(model, LatentPool(model.layout(block_tokens=64), 4, device))

    prompt = PromptTokenizer(files).chat([("user", question)]).tolist()
    answer = engine.generate(prompt, Sampling(max_tokens=8, stop_token_ids=files.eos_token_ids))

    assert files.tokenizer.decode([one.token_id for one in answer], skip_special_tokens=True) == " green"


@pytest.mark.full
def test_transformers_gives_the_access_code_of_the_harbour() -> None:
    transformers = pytest.importorskip("transformers")
    folder = embedded_checkpoint()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    text = "The ships come in the morning and leave at night. " * 20
    question = "Question: What is the access code of the harbour?\nAnswer:"
    prompt = f"{text}The access code of the harbour is 48213. {text}\n\n{question}"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == " 48213"
