"""Where a simulated fleet sends its requests: kvrelay's own placement, and four others to compare with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvrelay.bench.sim_nodes import Job
from kvrelay.core.clock import Clock
from kvrelay.core.types import Incarnation, Role
from kvrelay.index.mirror_state import MirrorState
from kvrelay.router.admission import TARGETS, Prospect, Refusal, Slo, Targets, Terms, judge
from kvrelay.router.books import Books, Entry
from kvrelay.router.fleet import NodeView
from kvrelay.router.placement import Pair, Question
from kvrelay.router.score import EXPECTED_OUTPUT_TOKENS
from kvrelay.router.shortlist import Roster


class Policy(Protocol):
    """Chooses a prefill and a decode node; None refuses the request."""

    def choose(self, job: Job, nodes: Sequence[NodeView]) -> tuple[Incarnation, Incarnation] | None: ...
    def first_token(self, job: Job) -> None: ...
    def finished(self, job: Job) -> None: ...


class Ours:
    """The router's placement, books and index mirror."""

    def __init__(
        self,
        mirror: MirrorState,
        clock: Clock,
        *,
        long_prompt_tokens: int = 1024,
        slo: Slo | None = None,
        targets: Mapping[Slo, Targets] = TARGETS,
    ) -> None:
        """`slo`: refuse what would not keep the targets of this class; None lets everything in."""
        self._targets = targets
        self._mirror = mirror
        self._books = Books(clock)
        self._long_prompt_tokens = long_prompt_tokens
        self._entries: dict[str, Entry] = {}
        self._slo = slo
        self._seen: Sequence[NodeView] = ()  # the nodes that the roster was made of
        self._roster = Roster(())

    def choose(self, job: Job, nodes: Sequence[NodeView]) -> tuple[Incarnation, Incarnation] | None:
        pair = self.place(job, nodes)
        if self._slo is not None and self._refusal(pair, self._slo) is not None:
            return None
        self.enter(job, pair)
        assert pair.decode is not None
        return pair.prefill.incarnation, pair.decode.incarnation

    def place(self, job: Job, nodes: Sequence[NodeView]) -> Pair:
        cached = {holder.node: count * job.block_tokens for holder, count in self._mirror.found(job.blocks)}
        for node, count in self._books.tentative_blocks(job.blocks):
            if (tokens := count * job.block_tokens) > cached.get(node, 0):
                cached[node] = tokens
        loads = self._books.loads()
        question = Question(
            prompt_tokens=job.prompt_tokens,
            total_tokens=job.prompt_tokens + job.output_tokens,
            needs_decode=True,
            long_prompt_tokens=self._long_prompt_tokens,
            cached_tokens=cached,
            loads=loads,
        )
        self._see(nodes)
        return self._roster.place(question, [loads])

    def _see(self, nodes: Sequence[NodeView]) -> None:
        """Take the nodes as of the latest heartbeat; a simulated fleet keeps its nodes and their order."""
        if nodes is self._seen:
            return
        if len(nodes) != len(self._seen):
            self._roster = Roster(nodes)
        for node, before in zip(nodes, self._seen, strict=False):
            if node is not before:
                self._roster.update(node)
        self._seen = nodes

    def _refusal(self, pair: Pair, slo: Slo) -> Refusal | None:
        prospect = Prospect(wait_s=pair.backlog_s(), compute_s=pair.work_s, step_s=pair.step_s(), is_proven=True)
        return judge(prospect, Terms(slo, float("inf")), waiting=0, max_waiting=1 << 30, targets=self._targets)

    def enter(self, job: Job, pair: Pair) -> None:
        assert pair.decode is not None
        pages = -(-(job.prompt_tokens + job.output_tokens) // pair.decode.page_tokens)
        context = job.prompt_tokens + min(job.output_tokens, EXPECTED_OUTPUT_TOKENS)
        self._entries[job.key] = self._books.enter(pair, decode_pages=pages, hashes=job.blocks, context=context)

    def first_token(self, job: Job) -> None:
        self._entries[job.key].computed()

    def finished(self, job: Job) -> None:
        self._entries.pop(job.key).release()


@dataclass(slots=True)
class Simple:
    """A rule for the prefill node that looks at one thing; decode nodes go by the number of their requests."""

    rule: Callable[[Job, Sequence[NodeView], Mapping[Incarnation, int]], NodeView]
    tokens: dict[Incarnation, int]
    requests: dict[Incarnation, int]
    where: dict[str, tuple[Incarnation, Incarnation]]

    def choose(self, job: Job, nodes: Sequence[NodeView]) -> tuple[Incarnation, Incarnation]:
        prefills = [node for node in nodes if node.role is Role.PREFILL]
        decodes = [node for node in nodes if node.role is Role.DECODE]
        prefill = self.rule(job, prefills, self.tokens).incarnation
        decode = min(decodes, key=lambda node: (self.requests.get(node.incarnation, 0), node.incarnation.name))
        self.tokens[prefill] = self.tokens.get(prefill, 0) + job.prompt_tokens
        self.requests[decode.incarnation] = self.requests.get(decode.incarnation, 0) + 1
        self.where[job.key] = prefill, decode.incarnation
        return prefill, decode.incarnation

    def first_token(self, job: Job) -> None:
        self.tokens[self.where[job.key][0]] -= job.prompt_tokens

    def finished(self, job: Job) -> None:
        self.requests[self.where.pop(job.key)[1]] -= 1


def simple(name: str, mirror: MirrorState, *, seed: int) -> Simple:
    """Return one of the policies random, round-robin, least-loaded and longest-prefix."""
    rng = random.Random(seed)  # noqa: S311 - a simulation, not a secret
    turn = iter(range(1 << 62))

    def longest_prefix(job: Job, nodes: Sequence[NodeView], _: Mapping[Incarnation, int]) -> NodeView:
        found = {holder.node: count for holder, count in mirror.found(job.blocks)}
        return max(nodes, key=lambda node: found.get(node.incarnation, 0))

    rules: dict[str, Callable[[Job, Sequence[NodeView], Mapping[Incarnation, int]], NodeView]] = {
        "random": lambda _, nodes, __: rng.choice(nodes),
        "round-robin": lambda _, nodes, __: nodes[next(turn) % len(nodes)],
        "least-loaded": lambda _, nodes, tokens: min(nodes, key=lambda node: tokens.get(node.incarnation, 0)),
        "longest-prefix": longest_prefix,
    }
    return Simple(rules[name], {}, {}, {})


def with_load(view: NodeView, queued_tokens: int, active_requests: int, free_pages: int) -> NodeView:
    """Return a node's record as of a heartbeat."""
    return replace(view, queued_tokens=queued_tokens, active_requests=active_requests, free_pages=free_pages)
