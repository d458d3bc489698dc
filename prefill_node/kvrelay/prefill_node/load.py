"""How busy a node is: cheap figures, noted by the step thread between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.prefill_node.control import RingControl


@dataclass(frozen=True, slots=True)
class Load:
    """Cheap figures after the last step; read by any thread."""

    free_pages: int = 0
    active_jobs: int = 0
    queued_jobs: int = 0
    closing_jobs: int = 0
    pushes: int = 0
    queued_tokens: int = 0
    has_work: bool = False  # a step would make progress

    @classmethod
    def of(cls, control: RingControl, *, computing: bool) -> Load:
        """Return the load as it is now; `computing`: a chunk is about to run."""
        return cls(
            free_pages=control.free_pages,
            active_jobs=control.active_jobs,
            queued_jobs=control.queued_jobs,
            closing_jobs=control.closing_jobs,
            pushes=len(control.pushes),
            queued_tokens=control.queued_tokens(),
            has_work=computing or control.has_chunk,
        )

    @property
    def is_empty(self) -> bool:
        """No page is held for any request or its hand-off, or for a push; pulls are not counted."""
        return not (self.active_jobs or self.queued_jobs or self.closing_jobs or self.pushes)
