"""What all kernels that are written in CuTe DSL share."""

from __future__ import annotations

import threading

# They are compiled when a kind of call comes for the first time, and the compiler fails when two threads of a process
# use it at once (seen with CuTe DSL 4.8.1). Calls only launch, so one at a time costs nothing.
ONE_AT_A_TIME = threading.Lock()
