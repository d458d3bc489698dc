"""Settings: one class gives options and variables; nothing wrong or unknown passes silently."""

from __future__ import annotations

import pytest
from pydantic_settings import SettingsConfigDict

from kvrelay.core.errors import SettingsError
from kvrelay.core.settings import NodeSettings, load
from kvrelay.prefill_node import ring_process
from kvrelay.prefill_node.settings import PrefillSettings


class _Settings(NodeSettings):
    """A node."""

    model_config = SettingsConfigDict(env_prefix="KVRELAY_TESTNODE_")


def _load(*argv: str) -> _Settings:
    return load(_Settings, list(argv), prog="kvrelay testnode")


def test_options_win_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_TESTNODE_MODEL", "from-env")
    monkeypatch.setenv("KVRELAY_TESTNODE_THREADS", "3")

    settings = _load("--threads", "2")

    assert (settings.model, settings.threads) == ("from-env", 2)


def test_an_unknown_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_TESTNODE_TREADS", "3")

    with pytest.raises(SettingsError, match="KVRELAY_TESTNODE_TREADS"):
        _load("--model", "m")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ((), "model is required"),
        (("--model", "m", "--lease-s", "0"), "lease_s"),
        (("--model", "m", "--max-request-s", "4294968"), "max_request_s: .*less than or equal to 4294967"),
        (("--model", "m", "--lease-s", "1e9"), "lease_s: .*less than or equal to 4294967"),
        (("--model", "m", "--listen", "nowhere"), "nowhere"),
        (("--model", "m", "--block-tokens", "100"), "block_tokens"),
        (("--model", "m", "--pool-pages", "5", "--pool-mib", "7"), "pool_pages=5 and pool_mib=7"),
        (("--model", "m", "--no-such-option", "5"), "--no-such-option"),
    ],
)
def test_wrong_options_are_one_clear_error(argv: tuple[str, ...], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        _load(*argv)


@pytest.mark.parametrize(
    ("options", "cpu", "gpu"),
    [
        ((), 1024, 32_768),  # what `bench step` measures
        (("--ring-size", "3"), 1024, 32_640),
        (("--chunk-tokens", "1000"), 1000, 896),
        (("--chunk-tokens", "100", "--ring-size", "8"), 100, 1024),
    ],
)
def test_a_chunk_is_whole_pages_of_every_rank_on_gpus(options: tuple[str, ...], cpu: int, gpu: int) -> None:
    settings = load(PrefillSettings, ["--model", "m", *options], prog="kvrelay prefill", environ={})

    assert settings.chunk_tokens_on("cpu") == cpu
    assert settings.chunk_tokens_on("cuda") == gpu


def test_the_process_of_a_ring_is_no_way_to_start_a_node_of_one() -> None:
    with pytest.raises(SettingsError, match="`kvrelay prefill` starts a node of one"):
        ring_process.main(["--model", "m"])
