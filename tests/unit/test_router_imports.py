"""A router runs where no torch is, and `up` looks at a checkpoint before it starts what brings one."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["kvrelay.router.app", "kvrelay.index.server", "kvrelay.index.writer"])
def test_neither_torch_nor_nixl_is_loaded_by_the_router(module: str) -> None:
    code = f"import sys, {module}; sys.exit(str({{'torch', 'nixl', 'transformers'}} & set(sys.modules) or ''))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stderr.strip() == ""


def test_looking_at_a_checkpoint_loads_no_torch() -> None:
    code = (
        "import sys\nfrom kvrelay.cli import fit, up\n"
        "from kvrelay.model.embedded_path import embedded_checkpoint\n"
        "fit.count_gpus = lambda: 0\n"  # where there are any, torch counts them, in a process of its own
        "fit.check(str(embedded_checkpoint()), dtype='auto', num_processes=1)\n"
        "sys.exit(str({'torch', 'nixl', 'redis'} & set(sys.modules) or ''))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stderr.strip() == ""
