"""The client commands against a cluster with a tokenizer: generate, nodes, drain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cluster.cluster import Cluster, events, wait_until
from cluster.specs import EMBEDDED
from kvrelay.proto.v1 import inference_pb2

SPEC = EMBEDDED
TEXT = "The quick brown fox jumps over the lazy dog. " * 8
TTFT_PARTS = ("queue_ms", "tokenize_ms", "place_ms", "reserve_ms", "prefill_ms", "delivery_ms")
SECOND_PARTS = ("exposed_relay_ms", "verify_ms", "admit_ms", "first_step_ms")


def cli(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvrelay.cli.main", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=100)


def test_short_prompts_go_to_the_ring_of_one_and_long_ones_to_the_largest(cluster: Cluster) -> None:
    # The first test here: what others make the nodes measure on a busy machine may speak for either.
    short = cluster.generate("hello", max_tokens=2)
    long = cluster.generate([5] * 1900, max_tokens=2)

    assert short.finished.nodes.ring_size == 1
    assert long.finished.nodes.ring_size == 2


def test_json_events_tell_the_whole_request(cluster: Cluster) -> None:
    done = cli("generate", TEXT, "--endpoint", cluster.endpoint, "--max-tokens", "12", "--ignore-eos", "--json")

    assert done.returncode == 0, done.stderr
    told = events(done.stdout)
    assert (told[0]["event"], told[-1]["event"]) == ("accepted", "finished")
    finished = told[-1]
    tokens = [one for one in told if one["event"] == "tokens"]
    assert sum(len(one["token_ids"]) for one in tokens) == finished["usage"]["completion_tokens"] == 12
    assert finished["finish_reason"] == "length"
    assert set(finished["usage"]) == {"prompt_tokens", "cached_tokens", "resident_tokens", "completion_tokens"}
    assert told[0]["nodes"]["prefill_node"].startswith("prefill-")
    assert finished["nodes"]["decode_node"] == "decode-0"
    assert all("logprobs" not in one for one in tokens)


def test_the_time_split_adds_up(cluster: Cluster) -> None:
    done = cli("generate", TEXT * 3, "--endpoint", cluster.endpoint, "--max-tokens", "12", "--ignore-eos", "--json")

    time_ms = events(done.stdout)[-1]["time"]
    assert sum(time_ms[name] for name in TTFT_PARTS) == pytest.approx(time_ms["ttft_ms"], rel=0.01, abs=0.5)
    assert sum(time_ms[name] for name in SECOND_PARTS) == pytest.approx(
        time_ms["second_token_ms"] - time_ms["ttft_ms"], rel=0.01, abs=0.5
    )
    # Both tokens leave in one event where the router was busy when the first one came.
    assert time_ms["total_ms"] >= time_ms["second_token_ms"] >= time_ms["ttft_ms"] > 0


def test_text_on_stdout_is_the_answer_and_nothing_else(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(TEXT)
    options = ["--endpoint", cluster.endpoint, "--max-tokens", "40"]
    shown = cli("generate", "--prompt-file", str(tmp_path / "prompt.txt"), *options)
    told = events(cli("generate", "--prompt-file", "-", *options, "--json", stdin=TEXT).stdout)

    assert shown.returncode == 0
    assert shown.stdout == "".join(one["text"] for one in told if one["event"] == "tokens") + "\n"


def test_streamed_text_is_what_all_tokens_decode_to_at_once(cluster: Cluster) -> None:
    """Tokens at random are often parts of a character; one that is split would decode to other text."""
    tokenizer = Tokenizer.from_file(str(SPEC.model / "tokenizer.json"))

    for seed in range(4):
        answer = cluster.generate("日本語 ¡olé! 🙂", max_tokens=60, temperature=3.0, seed=seed, ignore_eos=True)

        assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)


def test_the_same_seed_gives_the_same_text(cluster: Cluster) -> None:
    options = ["--endpoint", cluster.endpoint, "--temperature", "1.5", "--top-p", "0.9", "--json", "--ignore-eos"]
    options += ["--max-tokens", "40"]
    first = events(cli("generate", TEXT, *options).stdout)
    again = events(cli("generate", TEXT, *options, "--seed", str(first[0]["seed"])).stdout)

    assert [one.get("token_ids") for one in again if one["event"] == "tokens"] != []
    assert ids(again) == ids(first)


def ids(told: list[dict[str, object]]) -> list[int]:
    return [one for event in told if event["event"] == "tokens" for one in event["token_ids"]]  # type: ignore[attr-defined]


def test_logprobs_come_with_every_token_when_asked_for(cluster: Cluster) -> None:
    done = cli(
        "generate",
        TEXT,
        "--endpoint",
        cluster.endpoint,
        "--max-tokens",
        "6",
        "--ignore-eos",
        "--logprobs",
        "3",
        "--json",
    )

    for event in (one for one in events(done.stdout) if one["event"] == "tokens"):
        assert [one["token_id"] for one in event["logprobs"]] == event["token_ids"]
        for one in event["logprobs"]:
            assert len(one["top"]) == 3
            assert one["logprob"] == pytest.approx(one["top"][0]["logprob"])  # greedy takes the likeliest


def test_a_stop_string_ends_the_text_before_it(cluster: Cluster) -> None:
    whole = cluster.generate(TEXT, max_tokens=40, ignore_eos=True)
    middle = whole.text[len(whole.text) // 2 :][:3]

    stopped = cluster.generate(TEXT, max_tokens=40, ignore_eos=True, stop_strings=[middle])

    assert stopped.text == whole.text[: whole.text.index(middle)]
    assert stopped.finished.reason != whole.finished.reason


def test_a_refused_request_is_one_status_line_and_exit_code_1(cluster: Cluster) -> None:
    done = cli("generate", TEXT, "--endpoint", cluster.endpoint, "--top-p", "2", "--json")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("INVALID_ARGUMENT: ")
    assert "top_p" in done.stderr


def test_a_chat_is_rendered_with_the_models_template(cluster: Cluster) -> None:
    told = events(
        cli("generate", "hello", "--chat", "--endpoint", cluster.endpoint, "--max-tokens", "4", "--json").stdout
    )
    plain = events(cli("generate", "hello", "--endpoint", cluster.endpoint, "--max-tokens", "4", "--json").stdout)

    assert told[-1]["event"] == "finished"
    assert told[0]["prompt_tokens"] > plain[0]["prompt_tokens"]


def test_model_info_states_the_limits(cluster: Cluster) -> None:
    info = cluster.inference.ModelInfo(inference_pb2.ModelInfoRequest(), timeout=5)

    assert info.max_model_len == SPEC.max_model_len
    assert info.max_message_bytes == 32 << 20
    assert info.has_tokenizer
    assert info.vocab_size > 0


def test_nodes_lists_what_runs_where(cluster: Cluster) -> None:
    told = [json.loads(line) for line in cli("nodes", "--endpoint", cluster.endpoint, "--json").stdout.splitlines()]
    shown = cli("nodes", "--endpoint", cluster.endpoint).stdout

    assert {(one["name"], one["role"], one["ring_size"]) for one in told} == {
        ("prefill-0", "prefill", 1),
        ("prefill-1", "prefill", 2),
        ("decode-0", "decode", 1),
    }
    assert all(one["name"] in shown for one in told)


def test_a_drained_node_finishes_its_work_and_leaves(cluster: Cluster) -> None:
    call = cluster.start("hello", max_tokens=200, ignore_eos=True)
    next(iter(call))

    done = cli("drain", "prefill-0", "--endpoint", cluster.endpoint)
    unknown = cli("drain", "nobody", "--endpoint", cluster.endpoint)

    assert done.returncode == 0, done.stderr
    assert unknown.returncode == 1
    assert "nobody" in unknown.stderr
    assert [event.WhichOneof("event") for event in call][-1] == "finished"
    wait_until(lambda: {record.node.name for record in cluster.nodes()} == {"prefill-1", "decode-0"}, 30)
    assert cluster.generate("hello", max_tokens=2).finished.nodes.prefill_node == "prefill-1"
