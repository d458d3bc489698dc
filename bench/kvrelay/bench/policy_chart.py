"""A picture that compares placement policies: hits over the ceiling and evenness of work, per trace."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvrelay.core.errors import SettingsError

_FIGURES = (
    ("hit_over_ceiling", "hits over the ceiling"),
    ("max_over_mean_work", "most work over mean"),
    ("ttft_p99_s", "TTFT p99, s"),
)


def require() -> None:
    """
    Raises:
        SettingsError: the drawing library is not installed; names the extra that brings it.
    """
    if find_spec("matplotlib") is None:
        raise SettingsError("a picture needs matplotlib, which is not installed: pip install 'kvrelay[eval]'")


def write(file: Path, traces: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a PNG of the traces of `bench placement`: a row for each, a bar for each policy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(13, 1.0 + 2.4 * len(traces)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(traces), len(_FIGURES), squeeze=False)
    for row, (name, trace) in zip(grid, traces.items(), strict=True):
        policies = trace["policies"]
        for axes, (key, title) in zip(row, _FIGURES, strict=True):
            values = [policy[key] for policy in policies.values()]
            bars = axes.barh(list(policies), values, color=["#2a7" if "ours" in one else "#999" for one in policies])
            axes.bar_label(bars, labels=[f"{value:.3g}" for value in values], padding=3)
            if key.endswith("_s"):
                axes.set_xscale("log")  # the worst is a thousand times the best
            axes.margins(x=0.2)
            axes.invert_yaxis()
            axes.set_title(f"{name}: {title}", fontsize=9)
            if axes is not row[0]:
                axes.set_yticklabels([])
    figure.savefig(file, format="png", dpi=110)
