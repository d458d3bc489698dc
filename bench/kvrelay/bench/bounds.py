"""How even the work of a trace can lie at best: every request computed on one node, every hit had. Pure."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvrelay.bench.trace import Copies, Trace
from kvrelay.router.cost import NodeCost, compute_s


def works_s(trace: Trace, cost: NodeCost) -> Iterator[float]:
    """Return what each request takes when all blocks that came before it are cached where it is computed."""
    if isinstance(trace.arrivals, Copies):  # what one copy has is of no use to another
        of_base = list(works_s(replace(trace, arrivals=trace.arrivals.base), cost))
        yield from (of_base[number] for number in trace.arrivals.numbers)
        return
    seen: set[bytes] = set()
    for one in trace.arrivals:
        matched = next((depth for depth, block in enumerate(one.blocks) if block not in seen), len(one.blocks))
        seen.update(one.blocks[matched:])
        prompt = max(one.prompt_tokens, len(one.blocks) * trace.block_tokens)
        cached = min(matched * trace.block_tokens, prompt - 1)
        yield compute_s(cost, tokens=prompt - cached, cached=cached, ring_size=1, break_even_tokens=1)


def evenness_bounds(works: Sequence[float], num_nodes: int) -> dict[str, float]:
    """Return three bounds of the most loaded node's work over the mean.

    `least`: no placement gets below it: the mean, or the hardest request. `knowing_all` is reached by giving out all
    requests, hardest first, each to the node with the least, which needs to know them all before the first comes.
    `even_until_then` is what a policy ends with that knows nothing of what will come, and has spread evenly what came
    before the request that hurts most.
    """
    mean_s = sum(works) / num_nodes
    ends_s = [0.0] * num_nodes
    for work_s in sorted(works, reverse=True):
        heapq.heapreplace(ends_s, ends_s[0] + work_s)
    before_s, surprise_s = 0.0, 0.0
    for work_s in works:
        surprise_s = max(surprise_s, before_s / num_nodes + work_s)
        before_s += work_s
    return {
        "least": round(max(mean_s, *works) / mean_s, 3),
        "knowing_all": round(max(ends_s) / statistics.mean(ends_s), 3),
        "even_until_then": round(max(surprise_s, mean_s) / mean_s, 3),
    }
