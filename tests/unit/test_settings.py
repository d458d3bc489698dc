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
        ((), "--model is required .KVRELAY_TESTNODE_MODEL sets it too."),
        (
            ("--model", "m", "--lease-s", "0"),
            "--lease-s: '0' is not a number of at least 0.5 and of at most 4294967",
        ),
        (("--model", "m", "--max-request-s", "4294968"), "--max-request-s: '4294968' is not .* of at most 4294967"),
        (("--model", "m", "--lease-s", "1e9"), "--lease-s: .* of at most 4294967"),
        (("--model", "m", "--listen", "nowhere"), "--listen: 'nowhere' is not host:port"),
        (("--model", "m", "--metrics-listen", "9400"), "--metrics-listen: '9400' is not host:port"),
        (("--model", "m", "--log-level", "loud"), "--log-level: 'loud' is not one of debug, info, warning, error"),
        (("--model", "m", "--pool-pages=abc"), "--pool-pages: 'abc' is not a whole number of at least 0 .latent pages"),
        (("--model", "m", "--block-tokens", "100"), "--block-tokens: '100' is not .* and that is a multiple of 64"),
        (("--model", "m", "--pool-pages", "5", "--pool-mib", "7"), "--pool-pages=5 and --pool-mib=7"),
        (("--model", "m", "--no-such-option", "5"), "--no-such-option"),
    ],
)
def test_wrong_options_are_one_clear_error(argv: tuple[str, ...], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        _load(*argv)


def test_a_wrong_variable_is_named_unless_an_option_goes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_TESTNODE_POOL_PAGES", "abc")
    monkeypatch.setenv("kvrelay_testnode_pool_mib", "7")

    with pytest.raises(SettingsError, match="KVRELAY_TESTNODE_POOL_PAGES: 'abc' is not a whole number of at least 0"):
        _load("--model", "m")
    with pytest.raises(SettingsError, match="--pool-pages: '-1' is not a whole number of at least 0"):
        _load("--model", "m", "--pool-pages", "-1")
    with pytest.raises(SettingsError, match="kvrelay testnode: --pool-pages=5 and kvrelay_testnode_pool_mib=7 are"):
        _load("--model", "m", "--pool-pages", "5")


def test_what_is_wrong_with_a_switch_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_TESTNODE_DIRECT_WRITES", "maybe")

    with pytest.raises(SettingsError, match="KVRELAY_TESTNODE_DIRECT_WRITES: 'maybe' is not true or false"):
        _load("--model", "m")
    assert not _load("--model", "m", "--no-direct-writes").direct_writes


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
