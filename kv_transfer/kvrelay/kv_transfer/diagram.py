"""The state diagrams of docs/handoff.md, made from the tables.

`python -m kvrelay.kv_transfer.diagram docs/handoff.md` updates them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from kvrelay.kv_transfer.session_table import TRANSITIONS
from kvrelay.kv_transfer.writer_table import WRITER_TRANSITIONS

S = TypeVar("S", bound=Enum)
E = TypeVar("E")


def mermaid(table: Mapping[S, Mapping[type[E], frozenset[S]]]) -> str:
    """Return a Mermaid state diagram; events that leave the state as it is are left out."""
    first = next(iter(table))
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.value}"]
    for state, row in table.items():
        events: dict[S, list[str]] = {}
        for event, targets in row.items():
            for target in targets - {state}:
                events.setdefault(target, []).append(event.__name__)
        lines += [
            f"    {state.value} --> {target.value}: {', '.join(events[target])}" for target in table if target in events
        ]
        if not events:
            lines.append(f"    {state.value} --> [*]")
    return "\n".join([*lines, "```"])


def updated(text: str) -> str:
    """Return the document with both diagrams as the tables have them."""
    for name, diagram in (("reader", mermaid(TRANSITIONS)), ("writer", mermaid(WRITER_TRANSITIONS))):
        begin, end = f"<!-- {name} states, generated -->\n", f"\n<!-- end of {name} states -->"
        before, rest = text.split(begin)
        text = before + begin + diagram + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(updated(path.read_text()))
