"""Keeps the processes of one machine's cluster alive: starts them, restarts what died, drains them at the end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from kvrelay.cli.children import Child, Command, RestartBudget, all_gone, last_lines, start
from kvrelay.core.clock import monotonic
from kvrelay.core.errors import UnavailableError

DRAIN_S = 30.0  # then the rest is killed
KILL_S = 5.0  # then nobody waits any longer for what was killed: the kernel keeps it
SHOWN_LINES = 12


class Supervisor:
    """Runs commands until stopped.

    While starting up a child's death is an error; after that it is restarted, within its budget. A node that ends with
    status 0 was drained and stays out. `failed` is set when the cluster cannot go on.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._children: dict[str, Child] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._readers: set[asyncio.Task[None]] = set()
        self._given_up: set[str] = set()
        self._commands: dict[str, Command] = {}
        self._started = False
        self._stopping = False
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(
        self, commands: Sequence[Command], *, on_ready: Callable[[str, str], None] = lambda name, endpoint: None
    ) -> dict[str, str]:
        """Start all commands and return each one's address by name, once all are ready.

        Args:
            on_ready: told (name, address) as each gets there.

        Raises:
            UnavailableError: a child ended before it was ready; the text carries its last words.
        """
        self._commands = {command.name: command for command in commands}
        children = [await self._launch(command) for command in commands]
        self._keepers = [asyncio.create_task(self._keep(child)) for child in children]
        ready = asyncio.gather(*(self._first_ready(child, on_ready) for child in children))
        endpoints = dict(zip(self._commands, await ready, strict=True))
        for child in children:
            if not child.alive:  # ready, and dead while others were still loading
                raise UnavailableError(self._last_words(child))
        self._started = True
        return endpoints

    async def stop(self, roles_in_order: Sequence[str]) -> None:
        """Drain: ask one role after the other to end, and kill what has not within the drain time."""
        self._stopping = True
        until_s = monotonic() + DRAIN_S
        for role in roles_in_order:
            ending = [child for child in self._children.values() if child.command.role == role and child.alive]
            for child in ending:
                child.send(signal.SIGTERM)
            await self._wait_or_kill(ending, until_s)
        await self._end_tasks()

    async def kill_all(self) -> None:
        """End everything at once; return when nothing of it runs, or after KILL_S."""
        self._stopping = True
        await self._end_tasks()  # one of them may be starting a child anew
        for child in self._children.values():
            child.kill()
        await all_gone(self._children.values(), within_s=KILL_S)

    async def _end_tasks(self) -> None:
        tasks = (*self._keepers, *self._readers)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _launch(self, command: Command) -> Child:
        child, reader = await start(command)
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        self._children[command.name] = child
        return child

    async def _first_ready(self, child: Child, on_ready: Callable[[str, str], None]) -> str:
        try:
            endpoint = await child.ready
        except asyncio.CancelledError:
            if child.alive:
                raise  # we were cancelled, the child is well
            raise UnavailableError(self._last_words(child)) from None
        on_ready(child.command.name, endpoint)
        return endpoint

    async def _keep(self, child: Child) -> None:
        command, budget = child.command, RestartBudget()
        while True:
            status = await child.wait()
            if not self._restarts():
                return
            if status == 0:
                self._left(command)
                return
            self._say(self._last_words(child))
            delay_s = budget.delay_s(monotonic())
            if delay_s is None:
                self._give_up(command)
                return
            await asyncio.sleep(delay_s)
            if not self._restarts():
                return
            child = await self._launch(command)
            self._say(f"{command.name} restarted, process {child.process.pid}")

    def _restarts(self) -> bool:
        return self._started and not self._stopping

    def _left(self, command: Command) -> None:
        self._say(f"{command.name} was drained and has left")
        if command.role == "router" and not self.failed.done():
            self.failed.set_result("the router has left")

    def _give_up(self, command: Command) -> None:
        self._given_up.add(command.name)
        self._say(f"{command.name} keeps dying and stays down; see {command.log}")
        of_its_role = {name for name, other in self._commands.items() if other.role == command.role}
        if of_its_role <= self._given_up and not self.failed.done():
            self.failed.set_result(f"no {command.role} is left; see {command.log}")

    def _last_words(self, child: Child) -> str:
        status, command = child.process.returncode, child.command
        how = f"was ended by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
        tail = last_lines(command.log, num_lines=SHOWN_LINES)
        return "\n".join([f"{command.name} {how}", *(f"    {line}" for line in tail)])

    async def _wait_or_kill(self, ending: Sequence[Child], until_s: float) -> None:
        waits = [asyncio.create_task(child.process.wait()) for child in ending]
        if not waits:
            return
        _, late = await asyncio.wait(waits, timeout=max(0.5, until_s - monotonic()))
        for child in ending:
            if child.alive:
                self._say(f"{child.command.name} did not end within {DRAIN_S:.0f} s and is killed")
                child.kill()
        if late:
            await asyncio.wait(late, timeout=KILL_S)
