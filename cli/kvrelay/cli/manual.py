"""A long real text that every interpreter carries: Python's own reference manual."""

from __future__ import annotations


def python_manual() -> str:
    """Return about 460,000 characters of plain English with some code."""
    from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte

    return "\n\n".join(topics[name].strip() for name in sorted(topics))
