"""How dear it is on this machine to wake up and do nothing: limits on idle processes are meant for machines where it is
cheap. On a virtual machine in trouble it was seen to take twenty times as long."""

from __future__ import annotations

import subprocess
import sys

USUAL_S = 150e-6  # of CPU time per wake-up of an event loop
_NUM_WAKEUPS = 40
_WAKES = f"""
import asyncio, time
async def main():
    await asyncio.sleep(0.3)
    began_s = time.process_time()
    for _ in range({_NUM_WAKEUPS}):
        await asyncio.sleep(0.05)
    print((time.process_time() - began_s) / {_NUM_WAKEUPS})
asyncio.run(main())
"""


def dearness() -> float:
    """Return the factor by which wake-ups cost more CPU time here than usual, at least 1; takes 2.3 s."""
    took = subprocess.run([sys.executable, "-c", _WAKES], capture_output=True, text=True, check=True)
    return max(1.0, float(took.stdout) / USUAL_S)
