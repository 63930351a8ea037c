"""Training curves as inline SVG that takes its colours from the page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

__all__ = ["curves_svg"]

# Matplotlib wants concrete colours; each stands for a variable of the page, so that light and dark both fit.
_INK, _LINE, _FAINT = "#010203", "#040506", "#070809"
_VARIABLES = {_INK: "var(--soft)", _LINE: "var(--accent)", _FAINT: "var(--line)"}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "itm_fast",
    "font.size": 11,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
}


def curves_svg(metrics: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Title and SVG text of each curve: the loss over the steps, and the validation's sum of recalls."""
    train = [line for line in metrics if line["kind"] == "train"]
    validation = [line for line in metrics if line["kind"] == "validation"]
    curves = []
    if train:
        # The two kinds of mining sum over different negatives, so that only one of them makes a curve.
        mining = train[-1]["mining"]
        shown = [line for line in train if line["mining"] == mining]
        plot = _plot([line["step"] for line in shown], [line["loss"] for line in shown], "step", "loss")
        curves.append((f"Loss with {mining} negatives" if mining == "all" else "Loss with the hardest negatives", plot))
    if validation:
        plot = _plot(
            [line["epoch"] for line in validation], [line["rsum"] for line in validation], "epoch", "rsum", True
        )
        curves.append((f"Sum of recalls on {validation[-1]['split']}", plot))
    return curves


def _plot(x: Sequence[float], y: Sequence[float], x_label: str, y_label: str, dots: bool = False) -> str:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 3.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.plot(x, y, color=_LINE, linewidth=1.8, marker="o" if dots else None, markersize=4)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(length=0)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    # Only the element itself belongs into a page, not the XML prologue; its size follows the page.
    svg = svg[svg.index("<svg") :]
    return svg.replace("<svg ", '<svg role="img" aria-label="' + f"{y_label} by {x_label}" + '" ', 1)
