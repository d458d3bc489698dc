"""`kvrelay eval bpb`: bits per byte of a text under the model, beside what `xz -9e` makes of the same bytes."""

from __future__ import annotations

import argparse
import lzma
import math
from itertools import chain
from typing import Any

from kvrelay.cli.eval_run import ask_all, head, publish, target_of
from kvrelay.cli.eval_target import Target, Text
from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.text_file import read_text
from kvrelay.model.evaluation.bpb import Window, bits_per_byte, windows


def run(options: argparse.Namespace) -> int:
    """Score the text and print the figures."""
    content, text = read_text(options.text, InvalidRequestError), Text.of(options.model)
    if not content:
        raise InvalidRequestError(f"{options.text} is empty")
    ids = text.tokenizer.text(content).tolist()
    if ids[1:] != text.encode(content):
        raise InvalidRequestError(
            f"{text.folder}: its tokenizer does not begin a text with one special token, so the first cannot be scored"
        )
    context = options.window_tokens // 2 if options.context_tokens is None else options.context_tokens
    try:
        cut = windows(len(ids) - 1, window_tokens=options.window_tokens, context_tokens=context)
    except ValueError as err:
        raise InvalidRequestError(str(err)) from err
    with target_of(options, text) as target:
        _refuse_long(options.window_tokens, target)
        scored = ask_all(
            cut,
            lambda window: score(target, ids, window),
            num_workers=target.num_workers,
            title="scoring",
            unit="windows",
        )
        result = {
            **head("bpb", target, text),
            "window_tokens": options.window_tokens,
            "context_tokens": context,
            "scored_tokens": len(ids) - 1,
            **figures(list(chain.from_iterable(scored)), content.encode()),
        }
    publish(options, result, in_words=_in_words)
    return 0


def score(target: Target, ids: list[int], window: Window) -> list[float]:
    """Return the log-probabilities of a window's scored tokens.

    Args:
        ids: the text behind its first, special token; token i of the window's count is ids[i + 1].
    """
    found = target.prompt_logprobs(ids[window.start : window.end + 1])
    return found[window.score_from - window.start :]


def figures(logprobs: list[float], content: bytes) -> dict[str, Any]:
    """Return bits per byte of the model and of xz over the same bytes, and their ratio.

    Raises:
        InvalidRequestError: the model gave a log-probability that is no number.
    """
    if not all(map(math.isfinite, logprobs)):
        raise InvalidRequestError("the model gave log-probabilities that are not finite")
    bpb = bits_per_byte(logprobs, len(content))
    xz_bytes = len(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    xz_bpb = 8 * xz_bytes / len(content)
    return {"bytes": len(content), "bpb": bpb, "xz_9e_bytes": xz_bytes, "xz_9e_bpb": xz_bpb, "ratio": bpb / xz_bpb}


def _refuse_long(window_tokens: int, target: Target) -> None:
    longest = target.max_model_len - 2  # the token before the window, and the one that is generated
    if window_tokens > longest:
        raise InvalidRequestError(f"--window-tokens {window_tokens} is over {longest}, the most that the model takes")


def _in_words(result: dict[str, Any]) -> None:
    print(
        f"{result['bytes']} bytes in {result['scored_tokens']} tokens, windows of {result['window_tokens']}\n"
        f"model  {result['bpb']:.4f} bits per byte\n"
        f"xz -9e {result['xz_9e_bpb']:.4f} bits per byte\n"
        f"ratio  {result['ratio']:.4f}"
    )
