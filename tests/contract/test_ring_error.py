"""The precision of a ring, on a CPU."""

from __future__ import annotations

from ring_error_contract import *  # noqa: F403 - its tests are collected here
