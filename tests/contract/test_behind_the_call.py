"""On its way to the node that computes it, a prompt waits for nothing that the node does not need."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrelay.index.server import EmbeddedServer
from kvrelay.proto import convert
from kvrelay.proto.v1 import common_pb2, inference_pb2
from kvrelay.router import placement, placer, validation
from kvrelay.router.attempt import Attempt
from kvrelay.router.stream import ClientStream
from router_stage import ANSWER, ids, model_of_bytes, playing

PROMPT = np.arange(100, dtype=np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of_bytes(tmp_path_factory.mktemp("bytes"))


def asked_by_ids(max_tokens: int = 4) -> inference_pb2.GenerateRequest:
    prompt = inference_pb2.TokenPrompt(packed_ids=convert.pack_ids(PROMPT))
    return inference_pb2.GenerateRequest(tokens=prompt, sampling=common_pb2.Sampling(max_tokens=max_tokens))


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Note the calls of some functions, in order."""
    seen: list[str] = []

    def note(*places: tuple[Any, str]) -> list[str]:
        for owner, name in places:
            call = getattr(owner, name)

            @functools.wraps(call)
            def noted(*args: Any, call: Any = call, name: str = name, **named: Any) -> Any:
                seen.append(name)
                return call(*args, **named)

            monkeypatch.setattr(owner, name, noted)
        return seen

    return note


async def test_a_packed_prompt_goes_on_as_the_bytes_that_came(
    index: EmbeddedServer, model: Path, happened: Callable[..., list[str]]
) -> None:
    packed = happened((validation, "pack_ids"), (convert, "pack_ids"))
    request = asked_by_ids()
    packed.clear()
    async with playing(index, model) as stage:
        assert ids(await stage.run(request)) == ANSWER[:4]
        assert packed == []
        await stage.run(inference_pb2.GenerateRequest(text="hello", sampling=request.sampling))
        assert packed == ["pack_ids"]

    assert stage.prefill.calls[0].packed_ids == stage.decode.reserved[0].packed_ids == request.tokens.packed_ids


async def test_a_sampling_is_read_once(index: EmbeddedServer, model: Path, happened: Callable[..., list[str]]) -> None:
    read = happened((validation, "sampling_from_pb"), (convert, "sampling_to_pb"))
    async with playing(index, model) as stage:
        await stage.run(asked_by_ids())

    assert read == ["sampling_from_pb", "sampling_to_pb"]


async def test_why_it_went_there_is_said_once_the_prompt_has_left(
    index: EmbeddedServer, model: Path, happened: Callable[..., list[str]]
) -> None:
    order = happened((Attempt, "_start_prefill"), (placer, "explained"))
    async with playing(index, model) as stage:
        await stage.run(asked_by_ids())

    assert order == ["_start_prefill", "explained"]


async def test_a_token_leaves_before_the_books_hear_of_it(
    index: EmbeddedServer, model: Path, happened: Callable[..., list[str]]
) -> None:
    order = happened((ClientStream, "tokens"), (placer.IndexPlacer, "computed"))
    async with playing(index, model) as stage:
        await stage.run(asked_by_ids(max_tokens=8))

    assert order[:2] == ["tokens", "computed"]
    assert order.count("computed") == 1


async def test_what_all_placements_need_of_the_nodes_is_made_when_the_nodes_are_read(
    index: EmbeddedServer, model: Path, happened: Callable[..., list[str]]
) -> None:
    made = happened((placer, "Roster"), (placement, "missing_for_service"), (placement, "longest_served"))
    async with playing(index, model, registry_refresh_s=60.0) as stage:
        assert sorted(set(made)) == ["Roster", "longest_served", "missing_for_service"]
        made.clear()
        for _ in range(3):
            await stage.run(asked_by_ids())
        assert made == []


async def test_the_methods_of_a_node_are_looked_up_once(index: EmbeddedServer, model: Path) -> None:
    async with playing(index, model) as stage:
        nodes = stage.router.fleet.nodes()
        for node in nodes:
            assert stage.router.fleet.prefill(node) is stage.router.fleet.prefill(node)
            assert stage.router.fleet.decode(node) is stage.router.fleet.decode(node)

    assert len(nodes) == 2
