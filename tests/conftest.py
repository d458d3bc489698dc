"""Which tests run side by side on several workers: those of one process each, by file, and beside them the others.

Clusters of many processes follow each other on one worker, where tests of equal clusters share them.
"""

from __future__ import annotations

from typing import Any

import pytest

ONE_AFTER_ANOTHER = ("tests/cluster/", "tests/faults/")


@pytest.hookimpl(optionalhook=True)  # tests on a machine with GPUs have no xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 - not everywhere

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "clusters" if nodeid.startswith(ONE_AFTER_ANOTHER) else super()._split_scope(nodeid)

    return ByFile(config, log)
