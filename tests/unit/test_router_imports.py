"""A router runs where no torch is."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["kvrelay.router.app", "kvrelay.index.server", "kvrelay.index.writer"])
def test_neither_torch_nor_nixl_is_loaded_by_the_router(module: str) -> None:
    code = f"import sys, {module}; sys.exit(str({{'torch', 'nixl', 'transformers'}} & set(sys.modules) or ''))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stderr.strip() == ""
