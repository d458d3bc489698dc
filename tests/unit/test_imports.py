"""Imports point down only, pure modules stay pure, and the environment is read in one place per role."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from repo import ROOT, module_name, roots, sources

ENGINE = {"core", "proto", "index", "kvcache", "kernels", "model", "kv_transfer"}
# Which parts each part may import, besides itself.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "proto": {"core"},
    "index": {"core", "proto"},
    "router": {"core", "proto", "index"},
    "kvcache": {"core", "kernels"},
    "kernels": {"core"},
    "model": {"core", "kvcache", "kernels"},
    "kv_transfer": {"core", "proto", "kvcache", "kernels"},
    "prefill_node": ENGINE,
    "decode_node": ENGINE,
    "bench": {*ENGINE, "router", "prefill_node", "decode_node"},
    "cli": {*ENGINE, "router", "prefill_node", "decode_node", "bench"},
}
NO_TORCH = {"core", "proto", "index", "router"}
# No I/O, no clock, no device: events in, plans out.
PURE = {
    "kvrelay.core.errors",
    "kvrelay.core.layout",
    "kvrelay.core.prefix_hash",
    "kvrelay.core.shard",
    "kvrelay.core.types",
    "kvrelay.decode_node.admission",
    "kvrelay.decode_node.scheduler",
    "kvrelay.kv_transfer.attached_rank",
    "kvrelay.kv_transfer.plan",
    "kvrelay.kv_transfer.session",
    "kvrelay.kvcache.allocator",
    "kvrelay.kvcache.block_table",
    "kvrelay.kvcache.prefix_cache",
    "kvrelay.prefill_node.closing",
    "kvrelay.prefill_node.host_copies",
    "kvrelay.prefill_node.host_price",
    "kvrelay.prefill_node.host_tier",
    "kvrelay.prefill_node.rank_pages",
    "kvrelay.prefill_node.scheduler",
    "kvrelay.index.mirror_state",
    "kvrelay.router.admission",
    "kvrelay.router.cost",
    "kvrelay.router.learned",
    "kvrelay.router.placement",
    "kvrelay.router.score",
}
IMPURE_LIBRARIES = {
    "asyncio", "grpc", "nixl", "os", "pathlib", "redis", "socket", "subprocess", "threading", "time", "torch",
}  # fmt: skip
# Each reads the variables of its own role through its settings class; nothing else may look at the environment.
READS_ENVIRONMENT = {"kvrelay.core.settings"}
# Entry points of processes that run without the `node` extra.
MODEL_FREE = [
    "kvrelay.router.app",
    "kvrelay.cli.main",
    "kvrelay.cli.client",
    "kvrelay.cli.eval_bpb",
    "kvrelay.cli.eval_cluster",
    "kvrelay.cli.eval_recall",
]
FILES = [pytest.param(path, id=module_name(path)) for path in sources()]


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (dotted name, line) of everything a file imports, anywhere in it, `if TYPE_CHECKING` included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def part_of(module: str) -> str:
    return module.split(".")[1]


def test_every_part_has_a_rule() -> None:
    assert set(MAY_IMPORT) == set(roots())


def test_the_rules_have_no_cycle() -> None:
    below: set[str] = set()
    waiting = dict(MAY_IMPORT)
    while waiting:
        ready = {part for part, may in waiting.items() if may <= below}
        assert ready, f"parts that import each other: {sorted(waiting)}"
        below |= ready
        waiting = {part: may for part, may in waiting.items() if part not in ready}


def test_nothing_imports_the_command_line() -> None:
    assert [part for part, may in MAY_IMPORT.items() if "cli" in may] == []


def test_the_two_node_kinds_do_not_know_each_other() -> None:
    assert "decode_node" not in MAY_IMPORT["prefill_node"]
    assert "prefill_node" not in MAY_IMPORT["decode_node"]


@pytest.mark.parametrize("path", FILES)
def test_imports_point_down_only(path: Path) -> None:
    part = part_of(module_name(path))
    allowed = MAY_IMPORT[part] | {part}

    wrong = [
        f"line {line}: {name}"
        for name, line in imported(path)
        if name.startswith("kvrelay.") and part_of(name) not in allowed
    ]

    assert wrong == []


@pytest.mark.parametrize("path", [p for p in sources() if part_of(module_name(p)) in NO_TORCH], ids=module_name)
def test_torch_starts_below_the_router(path: Path) -> None:
    assert [line for name, line in imported(path) if name.split(".")[0] == "torch"] == []


def test_the_named_pure_modules_exist() -> None:
    assert PURE - {module_name(path) for path in sources()} == set()


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_modules_import_nothing_that_waits_computes_or_talks(module: str) -> None:
    path = ROOT / module.split(".")[1] / (module.replace(".", "/") + ".py")

    wrong = [f"line {line}: {name}" for name, line in imported(path) if name.split(".")[0] in IMPURE_LIBRARIES]

    assert wrong == []


@pytest.mark.parametrize("path", FILES)
def test_only_settings_modules_read_the_environment(path: Path) -> None:
    if module_name(path) in READS_ENVIRONMENT or path.stem == "settings":
        return
    reads = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "environb")
        # Setting a variable for a library, or handing the whole environment to a child, is not reading a setting.
        and not _is_handed_on(path, node.lineno)
    ]

    assert reads == []


def _is_handed_on(path: Path, line: int) -> bool:
    text = path.read_text().splitlines()[line - 1].strip()
    return "os.environ | " in text or "**os.environ" in text or text.startswith('os.environ["')


@pytest.mark.parametrize("module", MODEL_FREE)
def test_a_process_without_a_model_never_loads_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
