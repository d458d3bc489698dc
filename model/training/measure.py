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


def recall_cell(
    tokenizer: Tokenizer, filler: str, *, length: int, depth: float, samples: int, seed: int
) -> list[tuple[list[int], list[int]]]:
    """Return (prompt ids, answer ids) of one cell of the grid; a larger `samples` only adds to the end."""
    tasks = make_grid(
        filler=filler, encode=_encoder(tokenizer), lengths=[length], depths=[depth], samples=samples, seed=seed
    )
    return [task_ids(task, tokenizer) for task in tasks]


@torch.no_grad()
def answers_right(
    network: Network, prompts: Sequence[tuple[list[int], list[int]]], *, yarn: bool, tokens_per_batch: int = 131_072
) -> list[bool]:
    """Return for each (prompt ids, answer ids) whether greedy decoding gives the answer; prompts go in batches."""
    size = max(1, tokens_per_batch // max((len(prompt) for prompt, _ in prompts), default=1))
    batches = (prompts[first : first + size] for first in range(0, len(prompts), size))
    return [right for batch in batches for right in _batch_right(network, batch, yarn=yarn)]


def _batch_right(network: Network, batch: Sequence[tuple[list[int], list[int]]], *, yarn: bool) -> list[bool]:
    device = next(network.parameters()).device
    longest = max(len(prompt) + len(answer) for prompt, answer in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    where = torch.zeros(len(batch), longest - 1, dtype=torch.bool)
    for index, (prompt, answer) in enumerate(batch):
        ids[index, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        where[index, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
    ids, where = ids.to(device), where.to(device)
    states = network.hidden(ids[:, :-1], yarn=yarn)[where]  # those that predict a token of an answer
    wrong = F.linear(states, network.embed_tokens.weight).argmax(-1) != ids[:, 1:][where]
    rows = where.nonzero()[:, 0]
    misses: Tensor = torch.zeros(len(batch), dtype=torch.int64, device=device).index_add(0, rows, wrong.long())
    return [count == 0 for count in misses.tolist()]


def measure_recall(
    network: Network,
    tokenizer: Tokenizer,
    filler: str,
    *,
    lengths: Sequence[int],
    samples: int,
    yarn: bool,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Return, for each length, the share of right answers at each of DEPTHS."""

    def share(length: int, depth: float) -> float:
        cell = recall_cell(tokenizer, filler, length=length, depth=depth, samples=samples, seed=seed)
        return sum(answers_right(network, cell, yarn=yarn)) / samples

    return {str(length): [share(length, depth) for depth in DEPTHS] for length in lengths}


def _encoder(tokenizer: Tokenizer):  # type: ignore[no-untyped-def]
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
