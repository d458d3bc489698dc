"""The step thread of a rank: scheduler and compute."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvrelay.core.lifecycle import die

log = logging.getLogger(__name__)


def start_step_thread(body: Callable[[], None], on_end: Callable[[], object]) -> threading.Thread:
    """Run the step loop on its thread; whatever escapes it ends the process, because the ring is broken then."""

    def guarded() -> None:
        try:
            body()
        except Exception as err:  # the outermost edge of a thread
            log.exception("the step thread died")
            die(f"step thread: {err}")
        on_end()

    thread = threading.Thread(target=guarded, name="step", daemon=True)
    thread.start()
    return thread
