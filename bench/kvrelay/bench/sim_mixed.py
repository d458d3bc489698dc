"""A fleet that is not split, for comparison: every simulated device prefills and decodes.

Chunked: each step computes one token of every running sequence and one chunk of a prompt. Unchunked: a prompt is
computed whole, and the running sequences wait meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.bench.sim_fleet import Events, FleetPlan, FleetSim
from kvrelay.bench.sim_nodes import Job, SimDecode, SimPrefill
from kvrelay.bench.sim_policies import Policy
from kvrelay.bench.trace import Trace
from kvrelay.core.types import Incarnation
from kvrelay.index.mirror_state import MirrorState


class MixedSim(FleetSim):
    """As many decode parts as prefill parts; part k of both shares device k."""

    def __init__(
        self,
        plan: FleetPlan,
        trace: Trace,
        make_policy: Callable[[MirrorState, Events], Policy],
        *,
        chunked: bool,
    ) -> None:
        assert plan.prefill_nodes == plan.decode_nodes, plan
        super().__init__(plan, trace, make_policy)
        self._chunked = chunked
        self._device = dict(zip(self._prefill, self._decode.values(), strict=True))

    def _decode_of(self, job: Job, prefill: Incarnation) -> SimDecode:
        return self._device[prefill]

    def _run_chunk(self, node: SimPrefill) -> None:
        decode = self._device[node.node]
        self._end(decode.advance(self.events.clock()))
        begun = node.begin(self.events.clock())
        if begun is None:
            decode.paused = False
            self._watch(decode)
            return
        chunk, ends_s = begun
        if self._chunked:  # one decode step rides along with the chunk
            ends_s += decode.step_s() if decode.running else 0.0
            node.busy_until_s = ends_s
        decode.paused = True
        decode.version += 1  # whatever was due to end is not: the device is busy until then

        def ended() -> None:
            now_s = self.events.clock()
            gap_s = now_s - decode.advanced_s
            self._end(decode.ride_along(now_s, gap_s) if self._chunked else decode.advance(now_s))
            computed = node.ended(chunk)
            if computed is not None:
                self._computed(node, *computed)
            self._run_chunk(node)

        self.events.at(ends_s, ended)
