"""`make demo`: a cluster of real processes answers a long prompt, then a follow-up that reuses it, and goes away.

The prompt is Python's own reference manual, which every interpreter carries, with two sentences hidden in it.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from kvrelay.bench import local_cluster
from kvrelay.cli import client
from kvrelay.cli.manual import python_manual
from kvrelay.cli.progress import PrefillLine
from kvrelay.core.errors import ServeError
from kvrelay.model.embedded_path import embedded_checkpoint
from kvrelay.proto.v1 import common_pb2, inference_pb2, inference_pb2_grpc

PROMPT_TOKENS = 4000
FACTS = (" The access code of the lighthouse is 73914.", " The colour of the lighthouse is green.")
QUESTION = "What is the access code of the lighthouse?"
FOLLOW_UP = "And its colour?"
CLUSTER = ["--prefill", "1", "--ring-size", "2", "--decode", "1"]
MAX_TOKENS = 24
_TTFT = ("queue_ms", "tokenize_ms", "place_ms", "reserve_ms", "prefill_ms", "delivery_ms")
_SECOND = ("exposed_relay_ms", "verify_ms", "admit_ms", "first_step_ms")


@dataclass(slots=True)
class Answer:
    """One streamed answer and what was said about it. Filled by `ask`."""

    text: str = ""
    finished: dict[str, Any] = field(default_factory=dict)


def long_prompt(tokenizer: Tokenizer, *, num_tokens: int = PROMPT_TOKENS) -> str:
    """Return about `num_tokens` tokens of the Python manual with the facts inside and the question at the end."""
    manual = python_manual()
    room = num_tokens - len(tokenizer.encode(" ".join((*FACTS, QUESTION))).ids)
    offsets = tokenizer.encode(manual[: num_tokens * 8]).offsets
    third, half, whole = (_sentence_end(manual, offsets[place][0]) for place in (room // 3, room // 2, room))
    return manual[:third] + FACTS[1] + manual[third:half] + FACTS[0] + manual[half:whole] + "\n\n" + QUESTION


def _sentence_end(text: str, place: int) -> int:
    """Return where the sentence that reaches over `place` ends."""
    return text.index(". ", place) + 1


def ask(stub: inference_pb2_grpc.InferenceStub, conversation: Sequence[str]) -> Answer:
    """Send a conversation (user, assistant, user, ...), show the answer as it comes, and return it.

    Raises:
        grpc.RpcError: the request failed.
    """
    request = inference_pb2.GenerateRequest(sampling=common_pb2.Sampling(max_tokens=MAX_TOKENS))
    for number, content in enumerate(conversation):
        request.chat.messages.add(role=("user", "assistant")[number % 2], content=content)
    answer = Answer()
    with PrefillLine() as line:
        for event in stub.Generate(request, timeout=120):
            found = client.as_dict(event)
            if found["event"] == "accepted":
                line.update(0, found["prompt_tokens"])
            elif found["event"] == "progress":
                line.update(found["prefilled_tokens"], found["prompt_tokens"])
            elif found["event"] == "tokens":
                line.stop()
                answer.text += found["text"]
                print(found["text"], end="", flush=True)
            else:
                answer.finished = found
    print()
    return answer


def report(console: Console, answers: dict[str, Answer]) -> None:
    """Print where each answer was computed and where its time went, side by side."""
    table = Table(title="where it ran and where the time went", title_justify="left")
    table.add_column("")
    for title in answers:
        table.add_column(title, justify="right")
    done = [answer.finished for answer in answers.values()]
    table.add_row("prefill node (ring size)", *(_ran_on(one) for one in done))
    table.add_row("decode node", *(one["nodes"]["decode_node"] for one in done))
    for name in ("prompt_tokens", "cached_tokens", "resident_tokens", "completion_tokens"):
        table.add_row(
            name.replace("_", " "), *(str(one["usage"][name]) for one in done), end_section=name == "completion_tokens"
        )
    for name in _TTFT:
        table.add_row(f"  {name[:-3]}", *(_ms(one, name) for one in done))
    table.add_row("time to the first token", *(_ms(one, "ttft_ms") for one in done), style="bold", end_section=True)
    for name in _SECOND:
        table.add_row(f"  {name[:-3].replace('_', ' ')}", *(_ms(one, name) for one in done))
    table.add_row("time to the second token", *(_ms(one, "second_token_ms") for one in done), style="bold")
    console.print(table)


def _ran_on(finished: dict[str, Any]) -> str:
    return f"{finished['nodes']['prefill_node']} ({finished['nodes']['ring_size']})"


def _ms(finished: dict[str, Any], name: str) -> str:
    return f"{finished['time'][name]:.1f} ms"


def main() -> int:
    """Run the demo; return 0 when both answers came."""
    console, began_s = Console(), time.monotonic()
    kvrelay = Path(sys.executable).with_name("kvrelay")
    # The cluster is a session of its own: who ends this process must not leave it behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    prompt = long_prompt(Tokenizer.from_file(str(Path(embedded_checkpoint()) / "tokenizer.json")))
    console.rule("starting a cluster of real processes")
    try:
        with local_cluster.running(CLUSTER, show=True) as cluster, client.connect(cluster.endpoint) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            console.rule(f"{len(prompt):,} characters of manual with two facts hidden in them")
            console.print(f"... {QUESTION}", style="dim")
            first = ask(stub, [prompt])
            console.rule("a follow-up: what was said before is not computed again")
            console.print(f"... {FOLLOW_UP}", style="dim")
            second = ask(stub, [prompt, first.text, FOLLOW_UP])
            report(console, {"first prompt": first, "follow-up": second})
            console.rule("stopping")
    except grpc.RpcError as err:
        print(": ".join(client.error_of(err)), file=sys.stderr)
        return 1
    except ServeError as err:
        print(f"kvrelay demo: {err}", file=sys.stderr)
        return 1
    console.print("cached: not computed again, prefill had it; resident: not sent again, decode had it", style="dim")
    console.print(f"done in {time.monotonic() - began_s:.0f} s; your turn, in two terminals:")
    console.print(f"  {kvrelay} up\n  {kvrelay} generate 'The with statement'", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
