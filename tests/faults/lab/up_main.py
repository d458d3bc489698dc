"""`python -m faults.lab.up_main OPTION...`: `kvrelay up`, whose children are processes of the lab."""

from __future__ import annotations

import asyncio
import os
import sys

from kvrelay.cli import children, supervisor
from kvrelay.cli.children import Child, Command
from kvrelay.cli.main import main


async def start(command: Command) -> tuple[Child, asyncio.Task[None]]:
    """Like children.start, with the lab's entry."""
    with command.log.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "faults.lab.node_main", str(os.getpid()), command.role, *command.options,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
    child = Child(command, process)
    return child, asyncio.create_task(children._read_stdout(child))


if __name__ == "__main__":
    vars(supervisor)["start"] = start
    sys.exit(main(["up", *sys.argv[1:]]))
