"""A chunk that is paused between any two layers goes on as if nothing had been, on rings of any size."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from contract.ring_ranks import Case, Outcome, alone, launch
from contract.scripted_pauses import Scene
from contract.test_ring import recorded, rows_of
from kvrelay.core.types import PromptLogprobs
from oracle_data import FOLDER

MODEL = "v3_noaux"
LONG, SHORT = 333, (64, 7)


def prompt(length: int) -> tuple[int, ...]:
    return tuple(recorded(MODEL)[f"prompt_{length}"].tolist())


def a_case(*script: Scene, beside: int = 0, **rest: object) -> Case:
    case = Case(FOLDER / MODEL, prompt(LONG), chunk_tokens=100, ring_block_tokens=60, script=script)
    return dataclasses.replace(case, beside=tuple(map(prompt, SHORT[:beside])), **rest)  # type: ignore[arg-type]


@cache
def num_layers() -> int:
    return len(recorded(MODEL)["kv_latent"])


def everywhere() -> tuple[Scene, ...]:
    return tuple(Scene(chunk, layer) for chunk in range(4) for layer in range(num_layers()))


@cache
def cases() -> dict[str, Case]:
    return {
        "undisturbed": a_case(),
        **{
            f"behind layer {layer} of chunk {chunk}": a_case(Scene(chunk, layer, "pause for the next"), beside=1)
            for layer in range(num_layers())
            for chunk in (0, 2, 3)
        },
        "everywhere": a_case(*everywhere()),
        "twice for somebody": a_case(
            Scene(1, 1, "pause for the next"), Scene(1, 2), Scene(2, 0, "pause for the next"), beside=2
        ),
        "undisturbed, scored": a_case(prompt_logprobs=True),
        "scored": a_case(*everywhere(), prompt_logprobs=True),
        "undisturbed, fp8": a_case(latent_format="fp8"),
        "fp8": a_case(*everywhere(), latent_format="fp8"),
    }


@cache
def ends() -> dict[str, Case]:
    return {
        "cancelled while paused": a_case(Scene(1, 1, "pause and cancel"), seed=b"s"),
        "cancelled while paused, and somebody beside": a_case(
            Scene(1, 1, "pause for the next"), Scene(1, 2, "pause and cancel"), beside=1
        ),
        "cancelled when it goes on": a_case(Scene(1, 1), Scene(1, 2, "cancel")),
        "failed while paused": a_case(Scene(2, 1, "pause and fail")),
    }


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.full), 3])
def ring(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    wanted = cases() | ends()
    return dict(zip(wanted, launch(list(wanted.values()), request.param), strict=True))


@pytest.mark.timeout(300)
def test_a_paused_chunk_gives_the_same_rows_and_tokens(ring: dict[str, list[Outcome]]) -> None:
    for name, case in cases().items():
        reference = "undisturbed, fp8" if case.latent_format == "fp8" else "undisturbed"
        assert np.array_equal(rows_of(ring[name], 0, LONG), rows_of(ring[reference], 0, LONG)), name
        assert ring[name][0].token == ring[reference][0].token, name
        assert all(outcome.sealed for outcome in ring[name]), name
        layers = {outcome.counters["layers"] for outcome in ring[name]}
        assert layers == {num_layers() * (4 + len(case.beside))}, f"{name}: each layer is computed once"


def test_whoever_comes_in_a_pause_is_answered_rightly_and_first(ring: dict[str, list[Outcome]]) -> None:
    for name, case in cases().items():
        for number, of_prompt in enumerate(case.beside):
            found = [outcome.beside[number] for outcome in ring[name]]
            assert found[0].token == recorded(MODEL)[f"greedy_{len(of_prompt)}"][0], name
            merged = {key: row for one in found for key, row in one.rows.items()}
            assert len(merged) == num_layers() * len(of_prompt) == sum(len(one.rows) for one in found), name
        assert ring[name][0].counters.get("chunk_pauses_total", 0) == len(case.beside), name


def test_prompt_logprobs_of_a_paused_chunk_are_told_once(ring: dict[str, list[Outcome]]) -> None:
    def scores(name: str) -> list[PromptLogprobs]:
        return [event for event in ring[name][0].told if isinstance(event, PromptLogprobs)]

    assert scores("scored") == scores("undisturbed, scored")


def test_a_paused_chunk_that_is_given_up_leaves_nothing_behind(ring: dict[str, list[Outcome]]) -> None:
    for name, case in ends().items():
        error = "decode is gone" if "failed" in name else "not wanted any more"
        assert ring[name][0].error == error, name
        cached = 1 if case.seed else 0
        assert [outcome.held for outcome in ring[name]] == [(0, cached), *[(0, 0)] * (len(ring[name]) - 1)], name
        assert not any(outcome.sealed for outcome in ring[name]), name


def test_a_ticket_that_comes_in_a_pause_finds_the_rows_of_the_layers_before_it() -> None:
    late = alone(a_case(Scene(1, 2, "pause and ticket"), ticket_follows=True))
    assert np.array_equal(rows_of([late], 0, LONG), rows_of([alone(a_case())], 0, LONG))
    assert (late.sealed, late.held) == (True, (0, 0))


def test_the_reference_is_that_of_one_rank(ring: dict[str, list[Outcome]]) -> None:
    whole = alone(dataclasses.replace(a_case(), chunk_tokens=4096))
    assert np.abs(rows_of(ring["undisturbed"], 0, LONG) - rows_of([whole], 0, LONG)).max() < 1e-4
    assert ring["undisturbed"][0].token == whole.token == recorded(MODEL)[f"greedy_{LONG}"][0]
