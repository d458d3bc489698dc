"""A picture of a recall grid: length over depth, one colour per share of right answers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvrelay.core.errors import SettingsError


def require() -> None:
    """
    Raises:
        SettingsError: the drawing library is not installed; names the extra that brings it.
    """
    if find_spec("matplotlib") is None:
        raise SettingsError("a heat map needs matplotlib, which is not installed: pip install 'kvrelay[eval]'")


def write(file: Path, cells: Sequence[dict[str, Any]], *, title: str) -> None:
    """Write a PNG of the cells of `eval recall`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    lengths = list(dict.fromkeys(cell["length_tokens"] for cell in cells))
    depths = list(dict.fromkeys(cell["depth"] for cell in cells))
    by_place = {(cell["length_tokens"], cell["depth"]): cell["accuracy"] for cell in cells}
    shares = [[by_place[length, depth] for depth in depths] for length in lengths]

    figure = Figure(figsize=(1.6 + 0.8 * len(depths), 1.4 + 0.5 * len(lengths)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(shares, vmin=0.0, vmax=1.0, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set_yticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_xlabel("depth of the fact (0 = start)")
    axes.set_ylabel("prompt tokens")
    axes.set_title(title)
    for row, values in enumerate(shares):
        for column, share in enumerate(values):
            axes.text(column, row, f"{share:.2f}", ha="center", va="center")
    figure.colorbar(image, label="share of right answers")
    figure.savefig(file, format="png", dpi=120)
