"""How Python behaves in a process that serves: who waits for the interpreter, and when memory is looked through."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# A thread that comes back from a device asks for the interpreter; whoever computes in Python keeps it for this long.
# 5 ms is the default, as long as a step. Handing over takes some 10 us, and only happens where two threads want it.
SWITCH_S = 0.0001


@contextmanager
def serving() -> Iterator[None]:
    """Let threads take short turns while the block lasts; after it nothing that `settle` did is left either."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)
        gc.unfreeze()
        gc.collect()  # recorded steps hold device memory, and lie in cycles


def settle() -> None:
    """Leave what was loaded so far out of every later garbage collection; to be called once all is ready.

    Otherwise the first full collection goes through some 200,000 objects of the libraries, and every thread stands
    still for 100 ms.
    """
    gc.collect()
    gc.freeze()
