"""Training curves as inline SVG in the colours of the page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import matplotlib as mpl
from markupsafe import escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from itm_fast.files.messages import printable

__all__ = ["curves_svg", "without_rest"]

Line = Mapping[str, Any]

# Placeholder colours for Matplotlib. Each is replaced with a CSS variable of the page, for light and dark themes.
_INK, _LINE, _FAINT = "#010203", "#040506", "#070809"
_VARIABLES = {_INK: "var(--soft)", _LINE: "var(--accent)", _FAINT: "var(--line)"}
# Lines differ in width and dashes as well as colour, so that both are visible where they overlap.
_LINES: Sequence[dict[str, Any]] = (
    {"color": _LINE, "linewidth": 1.8},
    {"color": _INK, "linewidth": 1.4, "linestyle": "--"},
)
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


# Titles of the loss curve by the `mining` entry of the log.
_LOSSES = {
    "all": "Loss with all negatives",
    "hardest": "Loss with the hardest negatives",
    "selective": "Loss with selectively hard negatives",
    "semi_hard": "Loss with semi-hard negatives",
    "sct": "Selectively contrastive triplet loss",
    "contrastive": "Selectively contrastive triplet loss",  # former name, in older logs
}
# Other kinds of mining use the hardest negative of every anchor, or of no anchor.
_SELECTING = ("selective", "semi_hard")

Points = Sequence[tuple[float, float]]


@attrs.frozen
class _Curve:
    """A diagram of one or more lines over steps or epochs; a single line has no name."""

    title: str
    lines: Mapping[str, Points]
    x_label: str
    y_label: str
    best: Callable[..., Any] | None = None
    top: float | None = None


def curves_svg(metrics: Sequence[Line]) -> list[tuple[str, str]]:
    """Plot the training curves of a run.

    The curves are the loss, the sum of recalls on the validation split, and the diagnostics of SelHN and RVSE++
    (Figures 3, 5 and 7): the gradient norm of the first image layer, the score gap between the hardest negatives and
    the positives, the distance of their embeddings, the mean cosine within each modality, and, for selective mining,
    the share of anchors that use their hardest negative.

    Args:
        metrics: lines of the run's log.

    Returns:
        The title and SVG text of each curve that the log has numbers for.
    """
    return [(curve.title, _plot(curve)) for curve in _curves(metrics)]


def _curves(metrics: Sequence[Line]) -> Iterator[_Curve]:
    train = [line for line in metrics if line["kind"] == "train"]
    validation = [line for line in metrics if line["kind"] == "validation" and "epoch" in line and "rsum" in line]
    if train:
        # Losses of different kinds of mining are not comparable, so only those of the last kind are drawn.
        mining = train[-1].get("mining")
        points = _points([line for line in train if line.get("mining") == mining], "loss")
    if train and points:
        yield _Curve(_LOSSES.get(str(mining), "Loss"), {"": points}, "step", "loss", min)
    if validation:
        points = [(line["epoch"], line["rsum"]) for line in validation]
        split = printable(str(validation[-1].get("split")))
        yield _Curve(f"Sum of recalls on {split}", {"": points}, "epoch", "sum of recalls", max)
    for name, title, label in (
        ("image_grad_norm", "Gradient of the first image layer", "norm of the gradient"),
        ("hardest_gap", "Gap to the hardest negative", "mean score difference"),
        ("hardest_distance", "Distance to the hardest negative", "mean distance"),
        ("domain_risk", "Risk of the discriminators", "mean risk"),
    ):
        points = _points(train, name)
        if points:
            yield _Curve(title, {"": points}, "step", label)
    cosines = {"images": _points(train, "image_cosine"), "captions": _points(train, "caption_cosine")}
    if all(cosines.values()):
        yield _Curve("Cosine of different items", cosines, "step", "mean cosine")
    selecting = [line for line in train if line.get("mining") in _SELECTING]
    shares = {
        direction: [(step, 100 * share) for step, share in _points(selecting, name)]
        for direction, name in (("image to text", "i2t_hardest_share"), ("text to image", "t2i_hardest_share"))
    }
    if all(shares.values()):
        yield _Curve("Anchors that took their hardest negative", shares, "step", "share in percent", top=100)


def without_rest(lines: Sequence[Line]) -> Sequence[Line]:
    """Drop the last line of a log if it covers fewer steps than the lines before it.

    A run logs its last step in any case. That line averages few steps, and its batch may be smaller.
    """
    steps = [line["step"] for line in lines[-3:]]
    return lines[:-1] if len(steps) == 3 and steps[2] - steps[1] < steps[1] - steps[0] else lines


def _points(lines: Sequence[Line], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in without_rest(lines) if name in line]


def _plot(curve: _Curve) -> str:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.0, 2.9), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for (name, points), style in zip(curve.lines.items(), _LINES, strict=False):
            # Mark points if there are few: a single point has no line.
            marker = "o" * (len(points) < 40)
            axes.plot(
                *zip(*points, strict=True), label=name, marker=marker, markersize=4, clip_on=curve.top is None, **style
            )
        axes.set_xlabel(curve.x_label)
        axes.set_ylabel(curve.y_label, labelpad=8)
        axes.set_xlim(left=0)
        lowest = min(value for points in curve.lines.values() for _, value in points)
        axes.set_ylim(bottom=min(0, lowest), top=curve.top)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
        axes.tick_params(length=0)
        if len(curve.lines) > 1:
            axes.legend(frameon=False, labelcolor=_INK, loc="best")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    spoken = "; ".join(_spoken(name, points, curve) for name, points in curve.lines.items())
    return _part_of_page(buffer.getvalue(), f"curve-{curve.y_label.replace(' ', '-')}-", f"{curve.title}: {spoken}")


def _spoken(name: str, points: Points, curve: _Curve) -> str:
    """Describe a line in words, for screen readers."""
    values = {"first": points[0], "last": points[-1]}
    if curve.best is not None:
        # Of equal values, `min` and `max` return the first. Training keeps the last.
        best = curve.best(reversed(points), key=lambda point: point[1])
        values = {"first": points[0], "best": best, "last": points[-1]}
    words = "; ".join(f"{which} {value:.4g} at {curve.x_label} {x}" for which, (x, value) in values.items())
    return f"{name}, {words}" if name else words


def _part_of_page(svg: str, prefix: str, label: str) -> str:
    """Return only the SVG element, with the page's colours and unique ids, without prologue, metadata and styles."""
    svg = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL
    )
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
