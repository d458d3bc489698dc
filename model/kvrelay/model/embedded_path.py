"""Where the small checkpoint that ships with the package lies."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from kvrelay.core.errors import ModelLoadError


def embedded_checkpoint() -> Path:
    """Return the folder of the embedded checkpoint.

    Raises:
        ModelLoadError: this installation carries none.
    """
    folder = Path(str(resources.files("kvrelay.model") / "embedded"))
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder}: this installation has no embedded checkpoint; give a model folder")
    return folder
