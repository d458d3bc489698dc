"""The model against outputs recorded from an independent implementation."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from kvrelay.core.types import Sampling
from kvrelay.kvcache.pool import LatentPool
from kvrelay.model.checkpoint import load_model
from kvrelay.model.single import SingleEngine
from kvrelay.model.transformer import Model
from oracle_data import LENGTHS, MAX_MODEL_LEN, NAMES, Recording, oracle_folder, recorded_cache, recording

CPU = torch.device("cpu")
GREEDY = Sampling(max_tokens=24)


@functools.cache
def model_of(name: str) -> Model:
    return load_model(oracle_folder(name), dtype="float32", device=CPU, max_model_len=MAX_MODEL_LEN)


def an_engine(model: Model, *, num_pages: int = 30, page_tokens: int = 64) -> SingleEngine:
    layout = model.layout(block_tokens=page_tokens, page_tokens=page_tokens)
    return SingleEngine(model, LatentPool(layout, num_pages, CPU))


def largest_logit_error(engine: SingleEngine, expected: Recording, chunk_tokens: int | None) -> float:
    """Replay the recorded tokens; return the largest difference at the recorded positions."""
    session = engine.open(len(expected.prompt) + len(expected.greedy))
    rows = list(engine.prefill(session, expected.prompt, chunk_tokens=chunk_tokens, all_logits=True))
    rows += [engine.decode_step([session], [token])[0] for token in expected.greedy[:-1]]
    engine.close(session)
    pairs = zip(expected.positions, expected.logits, strict=True)
    return max(float(np.abs(rows[position].numpy() - logits).max()) for position, logits in pairs)


def check(name: str, length: int, chunk_tokens: int | None) -> None:
    expected, engine = recording(name, length), an_engine(model_of(name))

    tokens = [token.token_id for token in engine.generate(expected.prompt, GREEDY, chunk_tokens=chunk_tokens)]

    assert tokens == expected.greedy
    assert largest_logit_error(engine, expected, chunk_tokens) < 1e-3


@pytest.mark.parametrize("length", [1, 7, 64, 333, 1500])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_logits_equal_the_recorded_ones(name: str, length: int) -> None:
    check(name, length, chunk_tokens=None)


@pytest.mark.parametrize("chunk_tokens", [16, 100])
@pytest.mark.parametrize("name", NAMES)
def test_chunked_prefill_gives_the_recorded_tokens(name: str, chunk_tokens: int) -> None:
    check(name, 333, chunk_tokens)


@pytest.mark.full
@pytest.mark.parametrize("chunk_tokens", [16, 100])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_every_chunk_size_gives_the_recorded_tokens(name: str, length: int, chunk_tokens: int) -> None:
    check(name, length, chunk_tokens)


@pytest.mark.parametrize("chunk_tokens", [None, 16])
@pytest.mark.parametrize("name", NAMES)
def test_cached_rows_are_the_recorded_latents_and_rope_keys(name: str, chunk_tokens: int | None) -> None:
    engine, expected = an_engine(model_of(name)), recording(name, 64)
    latent, rope = recorded_cache(name)
    session = engine.open(64)

    engine.prefill(session, expected.prompt, chunk_tokens=chunk_tokens)

    for layer in range(len(latent)):
        rows = engine.rows(session, layer).numpy()
        width = latent.shape[-1]
        assert np.abs(rows[:, :width] - latent[layer]).max() < 1e-4
        assert np.abs(rows[:, width:] - rope[layer]).max() < 1e-4


@pytest.fixture(params=["v3_noaux", "v2_yarn", "v3_dynamic_ntk"])
def ragged(request: pytest.FixtureRequest) -> tuple[Model, list[Recording]]:
    return model_of(request.param), [recording(request.param, length) for length in (64, 1, 333, 7)]


def test_sequences_decoded_together_give_the_tokens_that_each_gives_alone(
    ragged: tuple[Model, list[Recording]],
) -> None:
    model, recordings = ragged
    engine = an_engine(model, num_pages=60, page_tokens=16)
    sessions = [engine.open(len(one.prompt) + 24) for one in recordings]
    tokens = [
        [int(engine.prefill(session, one.prompt).argmax())] for session, one in zip(sessions, recordings, strict=True)
    ]

    for _ in range(23):
        logits = engine.decode_step(sessions, [chosen[-1] for chosen in tokens])
        for chosen, token in zip(tokens, logits.argmax(-1).tolist(), strict=True):
            chosen.append(token)

    assert tokens == [one.greedy for one in recordings]


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_the_page_size_does_not_change_the_text(page_tokens: int) -> None:
    expected = recording("v3_noaux", 64)
    engine = an_engine(model_of("v3_noaux"), num_pages=100, page_tokens=page_tokens)

    assert [token.token_id for token in engine.generate(expected.prompt, GREEDY)] == expected.greedy


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["v3_dense", "v2_lite_greedy", "v3_noaux"])
def test_half_precision_stays_close_to_the_recorded_logits(name: str, dtype: str) -> None:
    model = load_model(oracle_folder(name), dtype=dtype, device=CPU, max_model_len=MAX_MODEL_LEN)
    expected, engine = recording(name, 333), an_engine(model)
    session = engine.open(333)

    logits = engine.prefill(session, expected.prompt, chunk_tokens=100, all_logits=True)

    before_the_end = [(p, row) for p, row in zip(expected.positions, expected.logits, strict=True) if p < 333]
    typical = np.median([np.abs(logits[p].numpy() - row).mean() for p, row in before_the_end])
    assert logits.dtype == torch.float32
    assert engine.rows(session, 0).dtype == model.dtype
    assert typical < (0.3 if dtype == "bfloat16" else 0.05)  # logits have a standard deviation of about 3
