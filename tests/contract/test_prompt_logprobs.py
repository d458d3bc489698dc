"""Prompt log-probabilities are the model's own, whatever the ring and the chunks."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch

from contract.ring_ranks import Case, Outcome, launch
from kvrelay.core.types import PromptLogprobs
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model import transformer
from kvrelay.model.checkpoint import load_model
from kvrelay.model.single import SingleEngine
from kvrelay.prefill_node.job_events import FirstToken
from oracle_data import oracle_folder, recording

MODELS = ("v3_noaux", "v3_odd_dims")
LENGTHS = (1, 2, 7, 333, 1500)
CHUNKS = (1, 16, 100, 4096)
PLACES = [
    (i + j + k, (model, length, chunk))
    for i, model in enumerate(MODELS)
    for j, length in enumerate(LENGTHS)
    for k, chunk in enumerate(CHUNKS)
    if length <= 40 * chunk  # a step per token proves nothing more on long prompts
]
EVERY = [name for _, name in PLACES]
FEW = [name for place, name in PLACES if place % 2 == 0]
TOLERANCE = 1e-3


def prompt_of(model: str, length: int) -> list[int]:
    return recording(model, length if length != 2 else 7).prompt[:length]


@cache
def expected(model: str, length: int) -> npt.NDArray[np.float64]:
    """Return the log-probability of every prompt token but the first, from the logits of one process."""
    loaded = load_model(oracle_folder(model), dtype="float32", device=torch.device("cpu"))
    engine = SingleEngine(loaded, LatentPool(loaded.layout(block_tokens=64), 30, loaded.device))
    prompt = prompt_of(model, length)
    logits = engine.prefill(engine.open(length), prompt, all_logits=True).double()
    found: npt.NDArray[np.float64] = logits.log_softmax(-1)[range(length - 1), prompt[1:]].numpy()
    return found


@pytest.fixture(
    scope="module",
    params=[(1, FEW), (3, FEW), *(pytest.param((size, EVERY), marks=pytest.mark.full) for size in (1, 2, 3))],
    ids=lambda param: f"{param[0]}-{len(param[1])}",
)
def outcomes(request: pytest.FixtureRequest) -> dict[tuple[str, int, int], Outcome]:
    """What rank 0 saw of each case."""
    size, names = request.param
    cases = [
        Case(oracle_folder(model), tuple(prompt_of(model, length)), chunk, ring_block_tokens=200, prompt_logprobs=True)
        for model, length, chunk in names
    ]
    found = launch(cases, size)
    return {name: by_rank[0] for name, by_rank in zip(names, found, strict=True)}


@pytest.mark.timeout(300)
def test_every_position_is_told_once_in_order_with_the_models_own_number(
    outcomes: dict[tuple[str, int, int], Outcome],
) -> None:
    for (model, length, chunk), outcome in outcomes.items():
        name = f"{model} {length} tokens, chunks of {chunk}"
        told = [event for event in outcome.told if isinstance(event, PromptLogprobs)]
        positions = [event.first_position + index for event in told for index in range(len(event.logprobs))]
        assert positions == list(range(1, length)), name
        values = np.array([value for event in told for value in event.logprobs])
        assert np.abs(values - expected(model, length)).max(initial=0.0) < TOLERANCE, name


def test_numbers_are_those_of_the_recorded_logits(outcomes: dict[tuple[str, int, int], Outcome]) -> None:
    for (model, length, chunk), outcome in outcomes.items():
        if length == 2:
            continue
        recorded = recording(model, length)
        told = [value for event in outcome.told if isinstance(event, PromptLogprobs) for value in event.logprobs]
        for position, logits in zip(recorded.positions, recorded.logits, strict=True):
            if position + 1 < length:
                reference = logits[recorded.prompt[position + 1]] - np.logaddexp.reduce(logits.astype(np.float64))
                assert told[position] == pytest.approx(reference, abs=TOLERANCE), (model, length, chunk, position)


def test_they_come_before_the_first_token_and_the_answer_is_the_same(
    outcomes: dict[tuple[str, int, int], Outcome],
) -> None:
    for (model, length, _), outcome in outcomes.items():
        kinds = [type(event) for event in outcome.told]
        assert kinds.count(FirstToken) == 1, kinds
        assert PromptLogprobs not in kinds[kinds.index(FirstToken) :], kinds
        if length != 2:
            assert outcome.token == recording(model, length).greedy[0]


def test_long_inputs_are_scored_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(oracle_folder("v3_noaux"), dtype="float32", device=torch.device("cpu"))
    hidden_TD = torch.randn(50, model.config.hidden_size)
    ids_T = torch.arange(50)
    whole = model.logits(hidden_TD).log_softmax(-1)[torch.arange(50), ids_T]
    monkeypatch.setattr(transformer, "LOGITS_BLOCK_NUMBERS", 7 * model.config.vocab_size)

    torch.testing.assert_close(model.logprobs(hidden_TD, ids_T), whole)
