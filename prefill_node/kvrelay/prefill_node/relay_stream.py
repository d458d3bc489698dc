"""Where what leaves a rank is launched: on a GPU beside the attention, on a CPU at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RelayStream:
    """Used by the step thread only."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        # Checksums are short, and go before what is left of a long kernel: else they end with it, and the part waits.
        self._stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None  # type: ignore[no-untyped-call]

    @property
    def runs_beside(self) -> bool:
        """Work is launched, and done while the thread goes on."""
        return self._stream is not None

    def mark(self) -> torch.cuda.Event | None:
        """Return the moment at which all that was launched so far is done; None: it is."""
        if self._stream is None:
            return None
        reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
        reached.record()
        return reached

    @contextmanager
    def behind(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Let what is launched inside wait for a moment, and not for what was launched after it."""
        if self._stream is None:
            yield
            return
        if mark is not None:
            self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield
