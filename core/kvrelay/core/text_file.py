"""Reading a small text file, with one form of error."""

from __future__ import annotations

from pathlib import Path

from kvrelay.core.errors import ServeError


def read_text(path: str | Path, error: type[ServeError]) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        error: it cannot be read; names the file, once, and the reason.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as err:
        raise error(f"{path}: cannot be read: {err.strerror or err}") from err  # the error's own text has the path too
    except UnicodeDecodeError as err:
        raise error(f"{path}: is not UTF-8: {err.reason} at byte {err.start}") from err
