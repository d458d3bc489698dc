"""Whether a model's weights fit into this machine's memory, asked before anything is started.

Runs as `python -m kvrelay.cli.fit MODEL DTYPE PROCESSES` in a process of its own, because the checkpoint loader
brings torch and the supervisor is to stay small.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from kvrelay.core.errors import ModelLoadError, ServeError


def check(model: str, *, dtype: str, num_processes: int) -> int:
    """Return the number of GPUs here, when `num_processes` copies of the weights fit.

    Raises:
        ModelLoadError: they do not, with the bytes needed and free; or the checkpoint is missing or damaged.
    """
    asked = [sys.executable, "-m", "kvrelay.cli.fit", model, dtype, str(num_processes)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)  # noqa: S603 - our own module
    if done.returncode != 0:
        raise ModelLoadError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "cannot read the model")
    return int(done.stdout)


def _main(model: str, dtype: str, num_processes: int) -> None:
    import torch  # noqa: PLC0415 - the supervisor imports this module

    from kvrelay.model.checkpoint import weights_bytes  # noqa: PLC0415
    from kvrelay.model.checkpoint_files import CheckpointFiles  # noqa: PLC0415
    from kvrelay.model.config import load_config  # noqa: PLC0415

    on_cpu = not torch.cuda.is_available()
    with CheckpointFiles(Path(model), load_config(Path(model))):
        pass  # opening checks that the files are there, whole, and what the config says
    one = weights_bytes(Path(model), "float32" if dtype == "auto" and on_cpu else dtype)
    free = psutil.virtual_memory().available
    if on_cpu and one * num_processes > free:
        raise ModelLoadError(
            f"{model} does not fit: {num_processes} processes need {one * num_processes} bytes for weights "
            f"({one} each), {free} are free"
        )
    print(torch.cuda.device_count())


if __name__ == "__main__":
    try:
        _main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except ServeError as err:
        sys.exit(str(err))
