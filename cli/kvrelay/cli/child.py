"""`python -m kvrelay.cli.child PARENT_PID ROLE OPTION...`: a role that ends when the process that started it does."""

from __future__ import annotations

import sys

from kvrelay.cli.main import main
from kvrelay.core.lifecycle import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
