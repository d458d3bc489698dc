"""Batches of rows, made ahead of time by worker processes; batch i depends only on the seed and i."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rows import RowMaker
from schedule import Stage
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Yields (ids int16 [rows, T + 1], kinds uint8 [rows, T + 1]) from step `first_step` on, for ever."""

    def __init__(self, tokens: Path, tokenizer: Path, stage: Stage, *, seed: int, first_step: int) -> None:
        self._tokens, self._tokenizer = tokens, tokenizer
        self._stage, self._seed, self._first_step = stage, seed, first_step

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one of many: no threads of its own
        worker = get_worker_info()
        offset, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        maker = RowMaker(np.load(self._tokens, mmap_mode="r"), Tokenizer.from_file(str(self._tokenizer)))
        step = self._first_step + offset
        while True:
            yield make_batch(maker, self._stage, random.Random(f"{self._seed}/{step}"))
            step += stride


def make_batch(maker: RowMaker, stage: Stage, rng: random.Random) -> tuple[Tensor, Tensor]:
    length = stage.row_tokens + 1
    num_recall = round(stage.rows * stage.recall_share)
    made = [maker.recall_row(rng, length, stage.shortest_episode_tokens) for _ in range(num_recall)]
    made += [maker.text_row(rng, length) for _ in range(stage.rows - num_recall)]
    ids, kinds = zip(*made, strict=True)
    return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(kinds))


def loader(dataset: Batches, *, workers: int, pin: bool) -> Iterator[tuple[Tensor, Tensor]]:
    prefetch = 4 if workers else None
    return iter(DataLoader(dataset, batch_size=None, num_workers=workers, pin_memory=pin, prefetch_factor=prefetch))


def tokenise(text: str, tokenizer: Tokenizer, eos: int) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    """Return the ids of a corpus file: its documents (separated by NUL), each followed by eos."""
    pieces = []
    documents = text.split("\0")
    for start in range(0, len(documents), 512):
        for encoding in tokenizer.encode_batch_fast(documents[start : start + 512], add_special_tokens=False):
            pieces += [np.array(encoding.ids, np.int16), np.array([eos], np.int16)]
    return np.concatenate(pieces)
