"""Typed reading of a JSON object, with errors that name the file, the key and the value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvrelay.core.errors import ModelLoadError
from kvrelay.core.text_file import read_text


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ModelLoadError: the file is missing, unreadable, no JSON, or not an object.
    """
    try:
        value = json.loads(read_text(path, ModelLoadError))
    except ValueError as err:
        raise ModelLoadError(f"{path}: is not JSON: {err}") from err
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: is a {type(value).__name__}, not an object")
    return value


class KeyReader:
    """Reads keys of one object and remembers which, so that the rest can be judged by name."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def raw(self, key: str, default: object = None) -> Any:
        """Return the value as it is; `default` when absent."""
        self._read.add(key)
        return self._values.get(key, default)

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number of at least `least`; null and absent give `default`, or are an error without one."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, value, f"a whole number of at least {least}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """Return a number; null and absent give `default`, or are an error without one."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or (positive and value <= 0):
            raise self.error(key, value, "a positive number" if positive else "a number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def unread(self) -> list[tuple[str, Any]]:
        """Return the keys that nobody asked for, with their values."""
        return [(key, value) for key, value in self._values.items() if key not in self._read]

    def error(self, key: str, value: object, wanted: str) -> ModelLoadError:
        found = "is missing" if value is None else f"is {json.dumps(value)}"
        return ModelLoadError(f"{self._where}: {key} {found}; it must be {wanted}")

    def refusal(self, key: str, value: object, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self._where}: {key} = {json.dumps(value)} is not supported: {why}")
