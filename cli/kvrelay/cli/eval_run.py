"""What both evaluations share: which target, many questions at once, a progress bar, the head of a result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from kvrelay.bench import report
from kvrelay.cli.eval_target import Target, Text
from kvrelay.cli.progress import new_progress

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def target_of(options: argparse.Namespace, text: Text) -> Iterator[Target]:
    """Return what the options name.

    Raises:
        UnavailableError: the cluster cannot be reached, or a request to it failed.
        ModelLoadError: the checkpoint cannot be loaded.
    """
    if options.endpoint:
        from kvrelay.cli.eval_cluster import connected  # noqa: PLC0415 - only this side needs gRPC
        from kvrelay.cli.identity import Identity  # noqa: PLC0415

        identity = Identity.of(options)
        with connected(
            options.endpoint, identity, num_workers=options.concurrency, timeout_s=options.timeout_s
        ) as cluster:
            yield cluster
    else:
        from kvrelay.cli.eval_folder import FolderTarget  # noqa: PLC0415 - only this side needs torch

        yield FolderTarget(text, latent_format=options.latent_format)


def ask_all(items: Sequence[T], ask: Callable[[T], R], *, num_workers: int, title: str, unit: str) -> list[R]:
    """Return the answers in order, asked by `num_workers` threads; the first failure ends the rest."""
    with ThreadPoolExecutor(num_workers) as pool, new_progress(unit=unit) as bar:
        task = bar.add_task(title, total=len(items))
        futures = [pool.submit(ask, item) for item in items]
        try:
            found = []
            for future in futures:
                found.append(future.result())
                bar.update(task, advance=1)
            return found
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def head(name: str, target: Target, text: Text) -> dict[str, Any]:
    """Return what a result begins with: enough to judge the figures and to repeat them."""
    return {
        "eval": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": report.machine(),
        "versions": report.versions(),
        "target": target.describe(),
        "tokenizer_of": text.files.name,
    }


def publish(options: argparse.Namespace, result: dict[str, Any], *, in_words: Callable[[dict[str, Any]], None]) -> None:
    """Print the result, as JSON or in words, and write the file that was asked for."""
    whole = json.dumps(result, indent=2, ensure_ascii=False)
    if options.json:
        print(whole)
    else:
        in_words(result)
    if options.out:
        Path(options.out).write_text(whole + "\n", encoding="utf-8")
