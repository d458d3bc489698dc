"""The control channel: one unix socket per process of the lab, lines of JSON both ways."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

from faults.lab import sabotages
from faults.lab.switchboard import Switchboard

FOLDER_VARIABLE = "FAULT_LAB_FOLDER"
_SABOTAGE_FILE = "sabotage"


def folder() -> Path:
    return Path(os.environ[FOLDER_VARIABLE])


def listen(name: str, board: Switchboard) -> None:
    """Obey orders for this process on a thread of its own; a standing sabotage is applied at once."""
    path = folder() / f"{name}.sock"
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    standing = folder() / _SABOTAGE_FILE
    if standing.exists():
        sabotages.apply(standing.read_text())
    threading.Thread(target=_serve, args=(server, board), name="lab", daemon=True).start()


def _serve(server: socket.socket, board: Switchboard) -> None:
    while True:
        connection, _ = server.accept()
        with connection, connection.makefile("rw") as lines:
            for line in lines:
                try:
                    answer = {"value": _obey(json.loads(line), board)}
                except Exception as err:  # whatever it is, the test is told, and later orders are obeyed
                    answer = {"error": f"{type(err).__name__}: {err}"}
                lines.write(json.dumps(answer) + "\n")
                lines.flush()


def _obey(order: dict[str, Any], board: Switchboard) -> Any:
    match order:
        case {"do": "arm", "point": point, **rule}:
            board.arm(point, **{name: value for name, value in rule.items() if name != "do"})
        case {"do": "clear"}:
            board.clear()
        case {"do": "forgive"}:
            board.forgive()
        case {"do": "sabotage", "name": name}:
            sabotages.apply(name)
        case {"do": "heal"}:
            sabotages.undo()
        case {"do": "hits"}:
            return dict(board.hits)
    return None


class Remote:
    """Gives orders to the processes of one lab."""

    def __init__(self, lab: Path) -> None:
        self._folder = lab

    def arm(self, process: str, point: str, kind: str = "on", **rule: Any) -> None:
        self._order(process, {"do": "arm", "point": point, "kind": kind, **rule})

    def clear(self) -> None:
        self.everywhere({"do": "clear"})

    def forgive(self) -> None:
        """Let the router use at once what it set aside."""
        self.everywhere({"do": "forgive"})

    def hits(self, process: str) -> dict[str, int]:
        found: dict[str, int] = self._order(process, {"do": "hits"})
        return found

    def sabotage(self, name: str) -> None:
        """Break every process, also those that are started later, until `heal`."""
        (self._folder / _SABOTAGE_FILE).write_text(name)
        self.everywhere({"do": "sabotage", "name": name})

    def heal(self) -> None:
        (self._folder / _SABOTAGE_FILE).unlink(missing_ok=True)
        self.everywhere({"do": "heal"})

    def everywhere(self, order: dict[str, Any]) -> None:
        for path in self._folder.glob("*.sock"):
            try:
                self._order(path.stem, order)
            except OSError:
                continue  # that process has ended or is stopped

    def _order(self, process: str, order: dict[str, Any]) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(3.0)
            connection.connect(str(self._folder / f"{process}.sock"))
            with connection.makefile("rw") as lines:
                lines.write(json.dumps(order) + "\n")
                lines.flush()
                answer = json.loads(lines.readline())
        if "error" in answer:
            raise AssertionError(f"{process} does not obey {order}: {answer['error']}")
        return answer["value"]
