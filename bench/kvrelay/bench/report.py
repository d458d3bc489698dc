"""Result files: one per device and day, one entry per bench, with what is needed to judge or repeat the figures."""

from __future__ import annotations

import json
import platform
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = (
    "kvrelay",
    "torch",
    "numpy",
    "grpcio",
    "nixl-cu13",
    "triton",
    "sgl-flash-mla",
    "flash-attn-4",
    "quack-kernels",
)


def paired(ours_s: Sequence[float], baseline_s: Sequence[float]) -> dict[str, float]:
    """Return the medians in ms and the median and spread of the paired ratios ours / baseline."""
    ratios = [a / b for a, b in zip(ours_s, baseline_s, strict=True)]
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return {
        "ours_median_ms": round(statistics.median(ours_s) * 1e3, 3),
        "baseline_median_ms": round(statistics.median(baseline_s) * 1e3, 3),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_quarter_1": round(quarters[0], 4),
        "ratio_quarter_3": round(quarters[2], 4),
    }


def write(folder: Path, *, device: str, bench: str, result: dict[str, Any]) -> Path:
    """Put the result into the file of this device and day, beside those of other benches; return the file."""
    today = datetime.now(UTC).date().isoformat()
    file = folder / f"{device}-{today}.json"
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    content |= {"date": today, "machine": machine(), "versions": versions()}
    content.setdefault("results", {})[bench] = result
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n")
    return file


def tell(result: dict[str, Any], *, out: str | None, device: str, bench: str) -> None:
    """Print a result and, with a folder, write it and print the file's name."""
    print(json.dumps(result, indent=1))
    if out:
        print(write(Path(out), device=device, bench=bench, result=result))


def versions() -> dict[str, str]:
    """Return the versions of what computes and talks, as far as it is installed."""
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    } | ({"gpus": gpus} if (gpus := _gpus()) else {})


def _gpus() -> list[str]:
    """Return name, memory and driver of each GPU, as nvidia-smi says them; nothing where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    asked = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)  # noqa: S603
    return said.stdout.splitlines() if said.returncode == 0 else []


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
