"""A process that is told to keeps freed memory, so that large messages cost the kernel nothing."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from kvrelay.core import freed_memory

# How many page faults twenty messages of 4 MiB make, each freed before the next one.
_MESSAGES = """
import resource, sys
from kvrelay.core import freed_memory
if sys.argv[1] == "keep":
    freed_memory.keep()
block = b"x" * (4 << 20)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(block)
before = faults()
for _ in range(20):
    first, second = bytearray(block), bytearray(block)
    del first, second
print(faults() - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", _MESSAGES, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_messages_after_the_first_few_make_no_page_faults() -> None:
    pages = (4 << 20) // 4096

    assert faults("keep") < 3 * pages  # of the first two
    assert faults("give back") > 20 * pages


def test_a_c_library_without_the_setting_goes_on_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())  # as of musl and of macOS: it has no mallopt

    freed_memory.keep()
