"""Has every token of every layer been written exactly once? Answered while the parts come in, not at the end.

A long prompt on a wide ring is over 100,000 parts; sorting them when the last one lands would show in the time to the
second token. So each layer keeps disjoint spans, joined where they touch: constant work per part.
"""

from __future__ import annotations

from kvrelay.core.shard import Span


class Coverage:
    """The parts of one hand-off against [wanted.start, wanted.end) in each of `num_layers` layers."""

    def __init__(self, wanted: Span, *, num_layers: int) -> None:
        self._wanted = wanted
        self._end_of: tuple[dict[int, int], ...] = tuple({} for _ in range(num_layers))
        self._start_of: tuple[dict[int, int], ...] = tuple({} for _ in range(num_layers))
        self._full_layers = num_layers if wanted.num_tokens == 0 else 0

    @property
    def complete(self) -> bool:
        """True when the spans added are a partition of what is wanted, in every layer.

        Spans are joined only end to start, so a layer that is one span of the wanted size was covered without overlap.
        """
        return self._full_layers == len(self._end_of)

    def refusal(self, layer: int, tokens: Span) -> str | None:
        """Return why a part cannot belong to this hand-off, or None."""
        if not 0 <= layer < len(self._end_of):
            return f"layer {layer} of {len(self._end_of)}"
        if not self._wanted.start <= tokens.start < tokens.end <= self._wanted.end:
            return f"tokens [{tokens.start}, {tokens.end}) outside [{self._wanted.start}, {self._wanted.end})"
        if tokens.start in self._end_of[layer] or tokens.end in self._start_of[layer]:
            return f"tokens [{tokens.start}, {tokens.end}) of layer {layer} written twice"
        return None

    def add(self, layer: int, tokens: Span) -> None:
        """Count a part that `refusal` lets pass."""
        assert self.refusal(layer, tokens) is None, "ask refusal() first"
        end_of, start_of = self._end_of[layer], self._start_of[layer]
        start, end = tokens.start, tokens.end
        if start in start_of:
            start = start_of.pop(start)
        if end in end_of:
            end = end_of.pop(end)
        end_of[start], start_of[end] = end, start
        self._full_layers += len(end_of) == 1 and (start, end) == (self._wanted.start, self._wanted.end)
