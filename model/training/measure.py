"""The two evaluations on a network in training: bits per byte, and recall over length x depth.

Recall is judged by one forward pass over prompt and answer: greedy decoding gives the answer exactly when the
most likely token at each of its positions is the answer's.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from network import Network
from tokenizers import Tokenizer
from torch import Tensor
from vocabulary import ASSISTANT, BOS, EOS, USER, id_of

from kvrelay.model.evaluation.bpb import bits_per_byte, windows
from kvrelay.model.evaluation.recall import RecallTask, make_grid

DEPTHS = tuple(i / 8 for i in range(9))


@torch.no_grad()
def measure_bpb(
    network: Network, tokenizer: Tokenizer, text: str, *, window_tokens: int, yarn: bool, rows: int = 16
) -> float:
    """Return bits per byte of the text; each token sees at least half a window before it."""
    device = next(network.parameters()).device
    ids = torch.tensor(tokenizer.encode(text).ids, device=device)  # begins with bos, which is not scored
    log_probs: list[float] = []
    cut = windows(len(ids) - 1, window_tokens=window_tokens, context_tokens=window_tokens // 2)
    for first in range(0, len(cut), rows):
        group = cut[first : first + rows]
        # Window indices count scored tokens; token i is ids[i + 1], so a window's input starts one before it.
        stacked = torch.stack([F.pad(ids[w.start : w.end + 1], (0, window_tokens - (w.end - w.start))) for w in group])
        logits = network(stacked[:, :-1], yarn=yarn).float()
        losses = F.cross_entropy(logits.flatten(0, 1), stacked[:, 1:].flatten(), reduction="none").view(len(group), -1)
        for window, row in zip(group, losses, strict=True):
            log_probs.append(-float(row[window.score_from - window.start : window.end - window.start].double().sum()))
    return bits_per_byte(log_probs, len(text.encode()))


def task_ids(task: RecallTask, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return (prompt ids, answer ids with eos) of a task, in its plain or chat form."""
    prompt = f"{USER}{task.prompt}{ASSISTANT}" if task.chat else task.prompt
    ids = [id_of(tokenizer, BOS), *tokenizer.encode(prompt, add_special_tokens=False).ids]
    return ids, [*tokenizer.encode(task.answer, add_special_tokens=False).ids, id_of(tokenizer, EOS)]


@torch.no_grad()
def answers_right(network: Network, batch: Sequence[tuple[list[int], list[int]]], *, yarn: bool) -> list[bool]:
    device = next(network.parameters()).device
    longest = max(len(prompt) + len(answer) for prompt, answer in batch)
    rows = torch.zeros(len(batch), longest, dtype=torch.int64, device=device)
    for row, (prompt, answer) in zip(rows, batch, strict=True):
        row[: len(prompt) + len(answer)] = torch.tensor(prompt + answer, device=device)
    hidden = network.hidden(rows[:, :-1], yarn=yarn)
    right = []
    for row, states, (prompt, answer) in zip(rows, hidden, batch, strict=True):
        where = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        guess: Tensor = F.linear(states[where], network.embed_tokens.weight).argmax(-1)
        right.append(bool((guess == row[len(prompt) : len(prompt) + len(answer)]).all()))
    return right


def measure_recall(
    network: Network,
    tokenizer: Tokenizer,
    filler: str,
    *,
    lengths: Sequence[int],
    samples: int,
    yarn: bool,
    seed: int = 0,
    tokens_per_batch: int = 131_072,
) -> dict[str, list[float]]:
    """Return, for each length, the share of right answers at each of DEPTHS."""
    encode = _encoder(tokenizer)
    result = {}
    for length in lengths:
        tasks = make_grid(filler=filler, encode=encode, lengths=[length], depths=DEPTHS, samples=samples, seed=seed)
        pairs = [task_ids(task, tokenizer) for task in tasks]
        size = max(1, tokens_per_batch // length)
        right = [r for i in range(0, len(pairs), size) for r in answers_right(network, pairs[i : i + size], yarn=yarn)]
        result[str(length)] = [sum(right[i : i + samples]) / samples for i in range(0, len(right), samples)]
    return result


def _encoder(tokenizer: Tokenizer):  # type: ignore[no-untyped-def]
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
