"""`python -m kvrelay.index.embedded_child PARENT_PID PROGRAM ARGUMENT...`: PROGRAM, which ends when its parent does."""

from __future__ import annotations

import os
import sys

from kvrelay.core.lifecycle import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - our own arguments; the parent death signal survives exec
