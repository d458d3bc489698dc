"""Live lines on stderr: one while a prompt is prefilled, gone when the answer begins, and bars of longer work."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class PrefillLine:
    """Shows nothing unless stderr is a terminal."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def update(self, done_tokens: int, total_tokens: int) -> None:
        """Show that `done_tokens` of `total_tokens` are prefilled."""
        if not sys.stderr.isatty():
            return
        if self._progress is None or self._task is None:
            self._progress = new_progress(unit="tokens")
            self._task = self._progress.add_task("prefill", total=total_tokens)
            self._progress.start()
        self._progress.update(self._task, completed=done_tokens, total=total_tokens)

    def stop(self) -> None:
        """Remove the line; legal at any time."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def new_progress(*, unit: str) -> Progress:
    """Return a bar on stderr that leaves no trace; it shows nothing unless that is a terminal."""
    from rich.console import Console  # noqa: PLC0415 - only for a terminal
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
