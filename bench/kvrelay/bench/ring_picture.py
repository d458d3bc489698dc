"""A picture of a ring's layer in time: a lane per stream, a colour per kind of kernel."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvrelay.core.errors import SettingsError

_COLOURS = {"attention": "tab:blue", "exchange": "tab:orange", "other": "lightgrey"}
_LABELS = {"attention": "attention", "exchange": "exchange of latents", "other": "expansion, merge, copies"}


def draw(found: dict[str, Any], file: Path, *, title: str) -> None:
    """Draw what `ring_exchange.timeline` found.

    Raises:
        SettingsError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise SettingsError("a picture needs matplotlib, which is not installed: pip install 'kvrelay[eval]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    kernels = found["kernels"]
    streams = sorted({one["stream"] for one in kernels})
    figure = Figure(figsize=(11, 1.4 + 0.6 * len(streams)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, colour in _COLOURS.items():
        for lane, stream in enumerate(streams):
            bars = [(one["at_ms"], one["ms"]) for one in kernels if (one["kind"], one["stream"]) == (kind, stream)]
            axes.broken_barh(bars, (lane - 0.4, 0.8), facecolors=colour, label=_LABELS[kind] if lane == 0 else None)
    axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
    axes.set_xlabel("ms")
    axes.set_title(title)
    axes.legend(loc="upper right", fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=120)
