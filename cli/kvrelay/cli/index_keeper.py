"""The prefix index's server for `up`: the embedded one, kept alive on its address, or one that somebody else runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay.core.errors import ServeError
from kvrelay.index.server import EmbeddedServer

_POLL_S = 0.5
_ANSWER_S = 5.0


class IndexKeeper:
    """Starts the embedded server and restarts it when it dies; of somebody else's it only asks whether it answers."""

    def __init__(self, index: str, say: Callable[[str], None]) -> None:
        self.url = index
        self._embedded = index == "embedded"
        self._say = say
        self._server: EmbeddedServer | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when the server answers; `url` is its address from then on.

        Raises:
            SettingsError, UnavailableError: it cannot be started, or does not answer; names it.
        """
        if not self._embedded:
            from kvrelay.index.client import ping  # noqa: PLC0415 - its library is large, and not needed otherwise

            await ping(self.url, timeout_s=_ANSWER_S)
            return
        self._server = EmbeddedServer.start()  # in this thread: the server ends with the one that started it
        self.url = self._server.url
        self._keeper = asyncio.create_task(self._keep(self._server.port))

    async def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._server is not None:
            self._server.stop()

    async def _keep(self, port: int) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            assert self._server is not None
            if not self._server.alive:
                self._say("the index server ended; restarting it, empty")
                try:
                    self._server = EmbeddedServer.start(port)
                except ServeError as err:
                    self._say(f"{err}; trying again")
