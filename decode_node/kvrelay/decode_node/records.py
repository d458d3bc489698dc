"""The requests of a node by epoch and by name, and aborts that came before their request. Owned by the event loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvrelay.core.types import Incarnation
from kvrelay.decode_node.requests import Phase, Record
from kvrelay.kv_transfer.values import Request

_MAX_REMEMBERED = 10_000  # early aborts


class Records:
    def __init__(self) -> None:
        self._by_key: dict[int, Record] = {}  # epoch counter
        self._aborted: OrderedDict[Request, None] = OrderedDict()

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._by_key.values()))

    def add(self, record: Record) -> None:
        self._by_key[record.key] = record

    def get(self, key: int) -> Record | None:
        return self._by_key.get(key)

    def forget(self, record: Record) -> None:
        self._by_key.pop(record.key, None)

    def active(self, request: Request) -> Record | None:
        """Return the record of an attempt that has not ended."""
        return next((one for one in self if one.is_active and one.ask.request == request), None)

    def held_by(self, holder: Incarnation, request_ids: set[str]) -> list[Record]:
        """Return this holder's records among `request_ids`; one that has ended counts until its stream was told."""
        return [one for one in self if one.ask.holder == holder and one.ask.request.request_id in request_ids]

    def remember_abort(self, request: Request) -> None:
        """An abort that overtakes its Reserve must win."""
        self._aborted[request] = None
        if len(self._aborted) > _MAX_REMEMBERED:
            self._aborted.popitem(last=False)

    def was_aborted(self, request: Request) -> bool:
        return request in self._aborted

    @property
    def num_active(self) -> int:
        return sum(one.is_active for one in self)

    @property
    def num_local_tokens(self) -> int:
        """Prompt tokens that wait to be computed here."""
        return sum(one.computes for one in self if one.is_active and not one.output)

    @property
    def num_running(self) -> int:
        return sum(one.phase is Phase.RUNNING for one in self)
