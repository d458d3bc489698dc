"""Where the lab reaches into a node: places at which the product passes something in or along anyway.

Points: `part` (every write, see part_faults), `decode.step`, `prefill.chunk`, `prefill.layer`, `host.save`, `host.load`
(a step, a layer of it, or a copy takes `seconds` longer; cleared, it goes on), `transfer`, `lease` (so does a round of
that thread), `decode.admit`, `decode.reserve`, `prefill.accept` (refused: `unavailable`, `invalid` or `full`),
`decode.room` (found, and said `seconds` later), `prefill.ticket` (of one that comes late: `late` by `seconds`, `twice`,
`refuse`d, or taken but the answer is `lost`), `renew` (the router's renewals do not leave), `place` (a request's first
attempt goes to the nodes that its kind names; where it goes after a failure is placement's choice, as ever).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import grpc

from faults.lab.part_faults import LabTransport
from faults.lab.switchboard import Switchboard
from kvrelay.core.errors import CapacityError, InvalidRequestError, ServeError, UnavailableError

_REFUSALS: dict[str, type[ServeError]] = {
    "unavailable": UnavailableError,
    "invalid": InvalidRequestError,
    "full": CapacityError,
}


def install(role: str, board: Switchboard) -> None:
    """Put the fault points of a role's process in; nothing strikes until a point is armed."""
    _hang_leases(board)
    if role != "router":
        _wrap_transport(board)
        _hang_transfer(board)
    if role == "decode":
        from kvrelay.decode_node.engine import DecodeEngine  # noqa: PLC0415 - only this role has it
        from kvrelay.decode_node.node import DecodeNode  # noqa: PLC0415

        _before(DecodeEngine, "step", lambda: board.linger("decode.step"))
        _before(DecodeNode, "on_admitted", lambda: _refuse(board, "decode.admit"))
        _before(DecodeNode, "reserve", lambda: _refuse(board, "decode.reserve"))
        _find_room_slowly(board)
    elif role == "prefill":
        from kvrelay.kvcache.host_store import HostStore  # noqa: PLC0415
        from kvrelay.prefill_node.chunk_layers import ChunkLayers  # noqa: PLC0415
        from kvrelay.prefill_node.rank import RankWorker  # noqa: PLC0415
        from kvrelay.prefill_node.servicer import PrefillServicer  # noqa: PLC0415

        _forget_slow_copies(board)
        _before(HostStore, "save", lambda: board.linger("host.save"))
        _before(HostStore, "load", lambda: board.linger("host.load"))
        _before(RankWorker, "_run_chunk", lambda: board.linger("prefill.chunk"))
        _before(ChunkLayers, "_layer", lambda: board.linger("prefill.layer"))
        _before(PrefillServicer, "_checked", lambda: _refuse(board, "prefill.accept"))
        _mistreat_tickets(board)
    else:
        _install_in_router(board)


def _install_in_router(board: Switchboard) -> None:
    from kvrelay.router.fetch import sources_of  # noqa: PLC0415
    from kvrelay.router.fleet import FleetView  # noqa: PLC0415
    from kvrelay.router.leases import LeaseKeeper  # noqa: PLC0415

    shortlist: Any = import_module("kvrelay.router.shortlist")
    renew, place, made = LeaseKeeper._renew_all, shortlist.place, FleetView.__init__

    def lossy(keeper: Any) -> None:
        if board.ask("renew") is None:
            renew(keeper)

    def among_the_named(nodes: Sequence[Any], question: Any, **rest: Any) -> Any:
        rule = None if question.avoid else board.ask("place")
        if rule is None:
            return place(nodes, question, **rest)
        # Blocks may be fetched from any.
        return place(
            _of_each_role(nodes, rule.kind.split(",")), question, **{"sources": sources_of(nodes, question), **rest}
        )

    def forgiving(view: Any, *args: Any, **rest: Any) -> None:
        made(view, *args, **rest)

        def forget() -> None:
            view._aside_until_s.clear()

        board.on_forgive.append(forget)

    setattr(LeaseKeeper, "_renew_all", lossy)  # noqa: B010 - a type checker would object
    shortlist.place = among_the_named
    setattr(FleetView, "__init__", forgiving)  # noqa: B010


def _of_each_role(nodes: Sequence[Any], names: list[str]) -> list[Any]:
    """Return the named nodes, and all of a role of which none is named or can be chosen."""
    meant = [node for node in nodes if node.incarnation.name in names]
    roles = {node.role for node in meant}
    return meant + [node for node in nodes if node.role not in roles]


def _wrap_transport(board: Switchboard) -> None:
    from kvrelay.kv_transfer.agent_thread import TransferThread  # noqa: PLC0415

    original = TransferThread.__init__

    def with_lab(self: Any, make_transport: Any, **rest: Any) -> None:
        def make(counters: Any) -> Any:
            # The checks of a transport's type are the protocol's, so a wrapper is as good as the real one.
            return LabTransport(make_transport(counters), board)

        original(self, make, **rest)

    setattr(TransferThread, "__init__", with_lab)  # noqa: B010


def _hang_transfer(board: Switchboard) -> None:
    from kvrelay.kv_transfer.agent_thread import TransferThread  # noqa: PLC0415

    _before(TransferThread, "_step", lambda: board.linger("transfer"))


def _hang_leases(board: Switchboard) -> None:
    from kvrelay.core.health import Beats  # noqa: PLC0415

    _before(Beats, "beat", lambda: board.linger("lease"))


def _find_room_slowly(board: Switchboard) -> None:
    from kvrelay.decode_node.node import DecodeNode  # noqa: PLC0415

    reserve = DecodeNode.reserve

    async def slowly(node: Any, ask: Any) -> Any:
        reserved = await reserve(node, ask)
        rule = board.ask("decode.room")
        await asyncio.sleep(rule.seconds if rule else 0.0)
        return reserved

    setattr(DecodeNode, "reserve", slowly)  # noqa: B010


def _mistreat_tickets(board: Switchboard) -> None:
    from kvrelay.prefill_node.servicer import PrefillServicer  # noqa: PLC0415

    give = PrefillServicer.GiveTicket

    async def mistreated(servicer: Any, request: Any, context: Any) -> Any:
        rule = board.ask("prefill.ticket")
        kind = rule.kind if rule else ""
        if rule and kind == "late":
            await asyncio.sleep(rule.seconds)
        elif kind in ("twice", "lost"):
            await give(servicer, request, context)
        if kind in ("lost", "refuse"):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "refused by the fault lab at prefill.ticket")
        return await give(servicer, request, context)

    setattr(PrefillServicer, "GiveTicket", mistreated)  # noqa: B010


def _forget_slow_copies(board: Switchboard) -> None:
    """A test that holds copies up must not let those of the next one seem slow."""
    from kvrelay.prefill_node.host_copier import HostCopier  # noqa: PLC0415

    made = HostCopier.__init__

    def forgiving(copier: Any, *args: Any, **rest: Any) -> None:
        made(copier, *args, **rest)
        board.on_forgive.append(copier._s_per_byte.clear)

    setattr(HostCopier, "__init__", forgiving)  # noqa: B010


def _before(owner: type, method: str, hook: Callable[[], None]) -> None:
    original = getattr(owner, method)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        hook()
        return original(*args, **kwargs)

    setattr(owner, method, hooked)


def _refuse(board: Switchboard, point: str) -> None:
    rule = board.ask(point)
    if rule is not None:
        raise _REFUSALS[rule.kind](f"refused by the fault lab at {point}")


def name_of(argv: list[str]) -> str:
    """Return the value of --name among options."""
    return argv[argv.index("--name") + 1] if "--name" in argv else f"pid-{sys.argv[0]}"
