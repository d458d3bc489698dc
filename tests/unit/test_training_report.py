"""The report counts right answers as greedy decoding would, and keeps what it has when its time is up."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from kvrelay.cli.manual import python_manual
from kvrelay.model.embedded_path import embedded_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "model" / "training"))

from export import export
from measure import DEPTHS, answers_right, recall_cell
from network import Network
from report import ROUND_SAMPLES, Recall, Report, measure
from shape import SMOKE
from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(0)
    return Network(SMOKE).eval()


@torch.no_grad()
def greedy(network: Network, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(network(torch.tensor([ids]), yarn=True)[0, -1].argmax()))
    return ids[len(prompt) :]


def test_an_answer_is_right_when_greedy_decoding_gives_it_whatever_else_is_in_the_batch(network: Network) -> None:
    generator = torch.Generator().manual_seed(1)
    pairs, wanted = [], []
    for index, length in enumerate((5, 40, 12, 33, 7, 21)):
        prompt = torch.randint(4, SMOKE.vocab_size, (length,), generator=generator).tolist()
        answer = greedy(network, prompt, 3 + index % 2)
        if index % 3 == 1:
            answer[-1] = (answer[-1] + 1) % SMOKE.vocab_size
        pairs.append((prompt, answer))
        wanted.append(index % 3 != 1)
    assert answers_right(network, pairs, yarn=True) == wanted
    assert answers_right(network, pairs, yarn=True, tokens_per_batch=80) == wanted


def test_more_samples_of_a_cell_only_add_to_it() -> None:
    tokenizer = Tokenizer.from_file(str(embedded_checkpoint() / "tokenizer.json"))
    few, many = (
        recall_cell(tokenizer, python_manual()[:60_000], length=256, depth=0.5, samples=count, seed=3)
        for count in (2, 5)
    )
    assert many[:2] == few
    assert len({tuple(prompt) for prompt, _ in many}) == 5


def test_rounds_add_up_and_the_last_one_is_short(network: Network) -> None:
    samples = ROUND_SAMPLES + 1
    prompts = {8: [[([4, 5, 6], greedy(network, [4, 5, 6], 2))] * samples for _ in DEPTHS]}
    prompts[8][2][ROUND_SAMPLES] = ([4, 5, 6], [0, 0])
    recall = Recall(network, True, {8: samples})
    while recall.unfinished():
        recall.ask_more(prompts, 8)
    assert recall.figures()["asked"] == {"8": samples * len(DEPTHS)}
    assert recall.figures()["right"] == {"8": samples * len(DEPTHS) - 1}
    assert recall.figures()["grid"]["8"][2] == pytest.approx(ROUND_SAMPLES / samples)


@pytest.mark.parametrize(("limit_s", "asked"), [(0.0, None), (1e9, 9)])
def test_a_report_without_time_keeps_its_bits_per_byte(
    network: Network, tmp_path: Path, limit_s: float, asked: int | None
) -> None:
    tokenizer = (embedded_checkpoint() / "tokenizer.json").read_bytes()
    for name in ("model", "model-after-window"):
        export(network, tmp_path / name, bos=0, eos=1)
        (tmp_path / name / "tokenizer.json").write_bytes(tokenizer)
    options = argparse.Namespace(samples=1, samples_beyond=1, samples_before=1)
    report = Report(tmp_path / "result.json", {"date": "today"}, limit_s)
    measure(tmp_path, python_manual()[100_000:130_000], report, options)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["date"] == "today"
    assert len(result["bpb"]) == 3
    assert result["bpb_over_xz"] > 1
    recall = result.get("recall_tuned")
    assert (recall and recall["asked"]["1024"]) == asked
