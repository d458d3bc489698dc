"""Nodes and questions for tests of placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvrelay.core.types import Incarnation, Role
from kvrelay.router.fleet import NodeView
from kvrelay.router.placement import Pair, Question

PAGE = 64
HASHES = [bytes([at]) * 16 for at in range(10)]


def node(name: str, role: Role, **changes: Any) -> NodeView:
    plain = NodeView(
        incarnation=Incarnation(name, 1), role=role, endpoint="", ring_size=1, layout_fingerprint=b"f", model="m",
        dtype="float32", max_model_len=100_000, block_tokens=PAGE, page_tokens=PAGE, total_pages=2000,
        free_pages=2000, active_requests=0, queued_tokens=0, draining=False,
    )  # fmt: skip
    return replace(plain, **changes)


def prefill(name: str, **changes: Any) -> NodeView:
    return node(name, Role.PREFILL, **changes)


def decode(name: str, **changes: Any) -> NodeView:
    return node(name, Role.DECODE, **changes)


def asked(prompt_tokens: int = 100, **changes: Any) -> Question:
    given_values = {"total_tokens": prompt_tokens + 20, "needs_decode": True, "long_prompt_tokens": 1024, **changes}
    return Question(prompt_tokens=prompt_tokens, **given_values)


def names(pair: Pair) -> tuple[str, str]:
    return pair.prefill.incarnation.name, pair.decode.incarnation.name if pair.decode else ""
