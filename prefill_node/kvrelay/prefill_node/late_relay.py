"""What stands where a request's relay will, while its ticket is on its way: rows that are final are noted."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.shard import Span
from kvrelay.core.types import SampledToken
from kvrelay.prefill_node.relay import Relay


class LateRelay:
    """Has the methods of `Relay`, and sends nothing."""

    pending = False

    def __init__(self) -> None:
        self._final: list[tuple[int, Sequence[Span]]] = []
        self._seal_with: tuple[SampledToken | None, int] | None = None

    def rows_final(self, layer: int, spans: Sequence[Span]) -> None:
        if spans:
            self._final.append((layer, spans))

    def pump(self) -> None:
        """Nothing leaves yet."""

    def seal(self, *, first_token: SampledToken | None, cached_tokens: int) -> None:
        self._seal_with = (first_token, cached_tokens)

    def pass_to(self, relay: Relay) -> None:
        """Catch up: from here on the relay is told itself."""
        for layer, spans in self._final:
            relay.rows_final(layer, spans)
        if self._seal_with is not None:
            first_token, cached_tokens = self._seal_with
            relay.seal(first_token=first_token, cached_tokens=cached_tokens)
