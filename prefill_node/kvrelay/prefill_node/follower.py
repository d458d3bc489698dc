"""The step thread of every rank but rank 0; leader.py is that one's."""

from __future__ import annotations

from kvrelay.prefill_node.group import Leave, RingGroup
from kvrelay.prefill_node.rank import RankWorker
from kvrelay.proto.v1 import ring_pb2


def follow(worker: RankWorker, group: RingGroup) -> None:
    """Obey rank 0 until told to exit.

    Raises:
        RingError, RuntimeError: rank 0 or a neighbour is lost; this process must exit.
    """
    worker.bind_thread()
    while True:
        step = ring_pb2.RingStep.FromString(group.receive())
        result = worker.run(step, lambda *_: Leave.NO)
        group.send_to_leader(result.report.SerializeToString())
        if step.shutdown:
            worker.close()
            return
