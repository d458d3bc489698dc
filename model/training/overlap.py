"""Counts how much of the held-out text stands in the training text too, and writes what is left without it.

    python model/training/overlap.py --data DATA [--strict FILE]

Words are compared without case and punctuation, characters with every run of white space as one blank. FILE receives
the held-out text without any line (a paragraph or a line of code) that shares 13 words in a row with training text.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
WORDS_IN_A_ROW, CHARS_IN_A_ROW = 13, 50
_WORD = re.compile(r"\w+")
_SPACE = re.compile(r"\s+")
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_BYTE = np.random.default_rng(0).integers(0, 2**64, 256, dtype=np.uint64)
_TABLE_BITS = 26


def runs(items: Hashes, length: int) -> Hashes:
    """Return one hash for each run of `length` items in a row, [max(0, len - length + 1)]."""
    result: Hashes | None = None
    power, size, covered = items, 1, 0  # `power` hashes runs of `size` items; the bits of `length` say which to join
    while size <= length:
        if length & size:
            shifted = power[covered:]
            if result is None:
                result = shifted
            else:
                common = min(len(result), len(shifted))
                result = result[:common] * _PRIME ** np.uint64(size) + shifted[:common]
            covered += size
        power = power[: max(0, len(power) - size)] * _PRIME ** np.uint64(size) + power[size:]
        size *= 2
    assert result is not None
    return result[: max(0, len(items) - length + 1)]


def word_runs(text: str) -> Hashes:
    words = np.fromiter((hash(word.lower()) & (2**64 - 1) for word in _WORD.findall(text)), np.uint64)
    return runs(words, WORDS_IN_A_ROW)


def char_runs(text: str) -> Hashes:
    raw = np.frombuffer(_SPACE.sub(" ", text).encode(), np.uint8)
    return runs(_BYTE[raw], CHARS_IN_A_ROW)


def seen_in(documents: Iterable[str], held_out: Hashes, hashes_of: Callable[[str], Hashes]) -> NDArray[np.bool_]:
    """Return for each hash of the held-out text whether any of the documents has it."""
    mask = np.uint64(2**_TABLE_BITS - 1)
    maybe = np.zeros(2**_TABLE_BITS, bool)  # most training hashes are ruled out by one look
    maybe[held_out & mask] = True
    hits: list[Hashes] = []
    for document in documents:
        hashes = hashes_of(document)
        hits.append(np.unique(hashes[maybe[hashes & mask]]))
    return np.isin(held_out, np.unique(np.concatenate(hits)) if hits else np.empty(0, np.uint64))


def without_shared_lines(text: str, shared_runs: NDArray[np.bool_]) -> str:
    """Return the text without the lines that hold a word of a shared run."""
    words = list(_WORD.finditer(text))
    shared = np.zeros(len(words), bool)
    for run in np.flatnonzero(shared_runs):
        shared[run : run + WORDS_IN_A_ROW] = True
    kept, end, word = [], 0, 0
    for line in text.splitlines(keepends=True):
        end += len(line)
        first = word
        while word < len(words) and words[word].start() < end:
            word += 1
        if not shared[first:word].any():
            kept.append(line)
    return re.sub(r"\n{3,}", "\n\n", "".join(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the held-out text that is in the training text.")
    parser.add_argument("--data", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--strict", type=Path, help="write the held-out text without what is shared")
    args = parser.parse_args()
    held_out = (args.data / "held_out.txt").read_text()
    documents = (args.data / "train.txt").read_text().split("\0")
    shared_words = seen_in(documents, word_runs(held_out), word_runs)
    shared_chars = seen_in(documents, char_runs(held_out), char_runs)
    strict = without_shared_lines(held_out, shared_words)
    result = {
        "held_out_bytes": len(held_out.encode()),
        "share_of_13_word_runs_in_training": float(shared_words.mean()),
        "share_of_50_character_runs_in_training": float(shared_chars.mean()),
        "strict_bytes": len(strict.encode()),
    }
    print(json.dumps(result, indent=1))
    if args.strict:
        args.strict.write_text(strict)


if __name__ == "__main__":
    main()
