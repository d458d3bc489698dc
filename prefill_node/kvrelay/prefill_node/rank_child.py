"""`python -m kvrelay.prefill_node.rank_child PARENT_PID OPTION...`: a further rank, which ends when rank 0 does.

Also while it still loads what a rank needs, which takes seconds.
"""

from __future__ import annotations

import sys

from kvrelay.core.errors import ServeError
from kvrelay.core.lifecycle import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    from kvrelay.prefill_node import ring_process

    try:
        ring_process.main(sys.argv[2:])
    except ServeError as err:
        sys.stderr.write(f"kvrelay prefill: error: {err}\n")
        sys.exit(1)
