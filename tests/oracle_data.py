"""The oracle checkpoints: small random models with outputs recorded from an independent implementation."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from repo import ROOT

FOLDER = ROOT.parent / "shared" / "oracles"
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
LENGTHS = (1, 7, 64, 333, 1500)
# Longest prompt plus recorded tokens; the dynamic-NTK model's own window is shorter.
MAX_MODEL_LEN = 2048
# An array's header is parsed as Python, which threads cannot all do at once in every version (CPython 106905).
_READING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Recording:
    """What was recorded for one prompt of one oracle."""

    prompt: list[int]
    greedy: list[int]  # 24 tokens
    positions: list[int]  # absolute, in prompt + greedy
    logits: npt.NDArray[np.float32]  # [positions, vocabulary]; the row at p predicts token p + 1


def oracle_folder(name: str) -> Path:
    """Return the checkpoint's folder; skips the test when the oracles are not there."""
    folder = FOLDER / name
    if not folder.is_dir():
        pytest.skip(
            f"no oracle checkpoints beside the repository ({FOLDER.parent.name}/{FOLDER.name}/{name})",
            allow_module_level=True,
        )
    return folder


def recording(name: str, length: int) -> Recording:
    with _READING, np.load(oracle_folder(name) / "oracle.npz") as arrays:
        return Recording(
            prompt=arrays[f"prompt_{length}"].tolist(),
            greedy=arrays[f"greedy_{length}"].tolist(),
            positions=arrays[f"pos_{length}"].tolist(),
            logits=arrays[f"logits_{length}"],
        )


def recorded_cache(name: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return (latent [layers, 64, C], rope key [layers, 64, R], half-split) of the 64-token prompt."""
    with np.load(oracle_folder(name) / "oracle.npz") as arrays:
        latent, rope = arrays["kv_latent"], arrays["k_rope"]
    if name.startswith("v2_"):  # this family keeps rotated pairs interleaved
        rope = np.concatenate((rope[..., 0::2], rope[..., 1::2]), axis=-1)
    return latent, rope
