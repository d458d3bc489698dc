"""Whether a checkpoint is whole and its weights fit into this machine's memory, asked before anything is started.

Nothing here imports torch, which takes seconds: headers are enough, and where there is no GPU nobody need count them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil

from kvrelay.core.errors import ModelLoadError, SettingsError
from kvrelay.core.layout import DTYPE_BYTES
from kvrelay.model.config import load_config
from kvrelay.model.tensors import loaded_bytes

# What a process talks to NVIDIA's driver through: on Linux, on Linux under Windows, and on Tegra boards.
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/nvmap"))
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


def check(model: str, *, dtype: str, num_processes: int) -> int:
    """Return the number of GPUs here, when `num_processes` copies of the weights fit.

    Raises:
        ModelLoadError: they do not, with the bytes needed and free; or the checkpoint is missing or damaged.
        SettingsError: what computes is not installed.
    """
    missing = [name for name in ("torch", "safetensors") if find_spec(name) is None]
    if missing:
        raise SettingsError(f"nodes need {' and '.join(missing)}: install kvrelay[node]")
    from kvrelay.model.checkpoint_files import CheckpointFiles  # noqa: PLC0415 - needs what was just looked for

    folder = Path(model)
    config = load_config(folder)
    with CheckpointFiles(folder, config, framework="np"):
        pass  # opening checks that the files are there, whole, and what the config says
    num_gpus = count_gpus()
    if num_gpus:
        return num_gpus
    one = loaded_bytes(config, DTYPE_BYTES["float32" if dtype == "auto" else dtype])
    free = psutil.virtual_memory().available
    if one * num_processes > free:
        raise ModelLoadError(
            f"{model} does not fit: {num_processes} processes need {one * num_processes} bytes for weights "
            f"({one} each), {free} are free"
        )
    return 0


def count_gpus(driver_files: Sequence[Path] = _DRIVER_FILES) -> int:
    """Return how many GPUs torch sees, CUDA_VISIBLE_DEVICES respected; none at once where no driver is."""
    if not any(file.exists() for file in driver_files):
        return 0
    asked = [sys.executable, "-c", _COUNT_GPUS]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    if done.returncode != 0:
        raise SettingsError(f"torch cannot count GPUs: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
    return int(done.stdout)
