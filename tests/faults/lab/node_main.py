"""`python -m faults.lab.node_main PARENT_PID ROLE OPTION...`: a role with fault points, otherwise the product's own.

With a rank in its environment it is a further one of a prefill ring, as `spawn_ranks` starts them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from faults.lab import control, seams
from faults.lab.switchboard import Switchboard
from kvrelay.cli.parser import ROLES
from kvrelay.core.errors import ServeError
from kvrelay.core.lifecycle import die_with_parent


def main(parent_pid: int, role: str, options: list[str]) -> int:
    die_with_parent(parent_pid)
    board = Switchboard()
    seams.install(role, board)
    name = seams.name_of(options)
    control.listen(f"{name}.rank{os.environ['RANK']}" if "RANK" in os.environ else name, board)
    if role == "prefill":
        ring: Any = import_module("kvrelay.prefill_node.ring_process")
        ring.spawn_ranks = _spawn_ranks
    module, _, function = ROLES[role].partition(":")
    try:
        status: int = getattr(import_module(module), function)(options) or 0
    except ServeError as err:
        sys.stderr.write(f"{role}: {err}\n")
        return 1
    return status


def _spawn_ranks(argv: Sequence[str], *, ring_size: int, store_port: int) -> list[subprocess.Popen[bytes]]:
    from kvrelay.prefill_node.settings import child_environment  # noqa: PLC0415 - not in every role

    return [
        subprocess.Popen(
            [sys.executable, "-m", "faults.lab.node_main", str(os.getpid()), "prefill", *argv],
            env=child_environment(rank=rank, ring_size=ring_size, store_port=store_port),
            stdout=subprocess.DEVNULL,
        )
        for rank in range(1, ring_size)
    ]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
