"""What is wrong with a setting, in words: where its value comes from, the value, and what would be right."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_LIMITS = {
    "gt": "above",
    "ge": "of at least",
    "lt": "below",
    "le": "of at most",
    "multiple_of": "that is a multiple of",
    "pattern": "of the form",
}
_NAME_OF_SEVERAL_WORDS = re.compile(r"[a-z]+(?:_[a-z]+)+")  # one word alone may be meant as a word


@dataclass(frozen=True, slots=True)
class Source:
    """Where settings come from; an option goes before a variable."""

    env_prefix: str
    variables: Mapping[str, str]
    argv: Sequence[str] = ()

    def name(self, field: str) -> str:
        """Return the option or variable that a field's value was given by."""
        option = "--" + field.replace("_", "-")
        if any(word.split("=", 1)[0] in (option, f"--no-{option[2:]}") for word in self.argv):
            return option
        variable = self.env_prefix + field.upper()
        # As they are read: in either case.
        return next((name for name in self.variables if name.upper() == variable), option)


def describe(error: ValidationError, fields: Mapping[str, FieldInfo], source: Source) -> str:
    """Return one line for all that is wrong."""
    return "; ".join(_problem(one, fields, source) for one in error.errors())


def _problem(problem: ErrorDetails, fields: Mapping[str, FieldInfo], source: Source) -> str:
    told = problem.get("ctx", {}).get("error")  # a check of our own
    if not problem["loc"]:
        return _NAME_OF_SEVERAL_WORDS.sub(
            lambda found: source.name(found[0]) if found[0] in fields else found[0], str(told or problem["msg"])
        )
    name = str(problem["loc"][0])
    if name not in fields:
        return f"{name}: {problem['msg']}"
    where = source.name(name)
    if problem["type"] == "missing":
        return f"{where} is required ({source.env_prefix}{name.upper()} sets it too): {fields[name].description}"
    return f"{where}: {problem['input']!r} is not {told or allowed(fields[name])} ({fields[name].description})"


def allowed(field: FieldInfo) -> str:
    """Return the values that a field takes."""
    if get_origin(field.annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(field.annotation)))
    kind: Any = field.annotation
    limits = [
        f"{words} {getattr(one, key)}" for key, words in _LIMITS.items() for one in field.metadata if hasattr(one, key)
    ]
    return f"{_KINDS.get(kind, kind)} {' and '.join(limits)}".rstrip()
