"""Which prompts a decode node completes itself. Pure.

A little that is missing behind a long resident prefix, as in the next turn of a chat, costs less than a hand-off. What
waits together is bounded, so that the batch is never held up for long; the rest is handed over as usual.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.decode_node.admission import PageBook
from kvrelay.decode_node.intake import Demand
from kvrelay.decode_node.records import Records


@dataclass(frozen=True, slots=True)
class LocalWork:
    most_tokens: int  # that may wait to be computed here; 0 = none
    block_tokens: int

    def takes(self, demand: Demand, *, book: PageBook, records: Records) -> bool:
        """Say whether what is missing of a prompt is computed here."""
        if not self.most_tokens or demand.wants_logprobs:
            return False
        missing = demand.prompt_tokens - book.resident_tokens(self.usable(demand))
        return missing + records.num_local_tokens <= self.most_tokens

    def usable(self, demand: Demand) -> list[bytes]:
        """Return the blocks of a prompt without its last token: that is computed here, into pages of its own."""
        return (demand.hashes or [])[: (demand.prompt_tokens - 1) // self.block_tokens]
