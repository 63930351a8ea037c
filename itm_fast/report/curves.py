"""Training curves as inline SVG that takes its colours from the page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from markupsafe import escape
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
    "font.size": 10.5,
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
        points = [(line["step"], line["loss"]) for line in train if line["mining"] == mining]
        # The last line may hold the steps since the one before alone: too few, and of a batch that is not full.
        if len(points) > 2 and points[-1][0] - points[-2][0] < points[-2][0] - points[-3][0]:
            points.pop()
        title = "Loss with all negatives" if mining == "all" else "Loss with the hardest negatives"
        curves.append((title, _plot(points, title, "step", "loss", min)))
    if validation:
        points = [(line["epoch"], line["rsum"]) for line in validation]
        title = f"Sum of recalls on {validation[-1]['split']}"
        curves.append((title, _plot(points, title, "epoch", "sum of recalls", max)))
    return curves


def _plot(points: list[tuple[int, float]], title: str, x_label: str, y_label: str, best: Callable[..., Any]) -> str:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.0, 2.9), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        # Few points are shown as such: one alone would make no line at all.
        axes.plot(*zip(*points, strict=True), color=_LINE, linewidth=1.8, marker="o" * (len(points) < 40), markersize=4)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label, labelpad=8)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
        axes.tick_params(length=0)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    values = {"first": points[0], "best": best(points, key=lambda point: point[1]), "last": points[-1]}
    spoken = "; ".join(f"{which} {value:.4g} at {x_label} {x}" for which, (x, value) in values.items())
    return _part_of_page(buffer.getvalue(), f"curve-{y_label.replace(' ', '-')}-", f"{title}: {spoken}")


def _part_of_page(svg: str, prefix: str, label: str) -> str:
    """The element alone, in the page's colours: no prologue, no metadata, no rules for the page, ids of its own."""
    svg = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL
    )
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
