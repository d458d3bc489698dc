"""Recorded reference answers: tiny checkpoints with what Hugging Face transformers computed for them.

They lie beside the repository, not in it. Where they are missing, tests that need them are skipped with a reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from repo import ROOT

FOLDER = ROOT.parent / "shared" / "oracles"
PROMPT_LENGTHS = (1, 7, 64, 333, 1500)
NAMES = (
    "v2_group_limited",
    "v2_lite_greedy",
    "v2_yarn",
    "v3_dense",
    "v3_dynamic_ntk",
    "v3_linear",
    "v3_noaux",
    "v3_odd_dims",
    "v3_sharded",
    "v3_yarn",
)


@dataclass(frozen=True)
class Oracle:
    """One checkpoint and its recorded outputs, all computed in float32."""

    name: str
    folder: Path

    @cached_property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        with np.load(self.folder / "oracle.npz") as found:
            return dict(found)

    @cached_property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return found

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    def prompt(self, length: int) -> npt.NDArray[np.int32]:
        return self.arrays[f"prompt_{length}"]

    def greedy(self, length: int) -> npt.NDArray[np.int32]:
        """Return the 24 greedy tokens after the prompt, each step with the cache of the ones before."""
        return self.arrays[f"greedy_{length}"]

    def positions(self, length: int) -> npt.NDArray[np.int32]:
        """Return the positions in prompt + greedy whose logits were recorded."""
        return self.arrays[f"pos_{length}"]

    def logits(self, length: int) -> npt.NDArray[np.float32]:
        """Return the logits [positions, vocabulary]; the row at position p predicts token p + 1."""
        return self.arrays[f"logits_{length}"]


@lru_cache
def load(name: str) -> Oracle:
    """Return one oracle; skips the calling test (or module) when it is not on this machine."""
    folder = FOLDER / name
    if not (folder / "oracle.npz").exists():
        pytest.skip(f"recorded reference {name} is not on this machine", allow_module_level=True)
    return Oracle(name, folder)
