"""Training curves of several runs in one figure, as in Figures 3, 5 and 7 of SelHN and RVSE++.

Inside: `write_comparison`; `check_suffix`, `write_figure`, `line_style` and `point_style` for other figures.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from itm_fast.files import atomic
from itm_fast.files.messages import printable, shortened
from itm_fast.report.curves import without_rest

__all__ = ["SUFFIXES", "check_suffix", "line_style", "point_style", "write_comparison", "write_figure"]

SUFFIXES = (".svg", ".png", ".pdf")

Metrics = Sequence[Mapping[str, Any]]

# Maximum number of points in a line. More are averaged over neighbours, because single batches are noisy.
_POINTS = 60
# Okabe and Ito's colour-blind safe palette; line styles also distinguish the runs in black and white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "^", "s", "D")
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "itm_fast",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e1dc",
    "axes.axisbelow": True,
}
_PANELS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("Loss", "loss", "train", ("loss",)),
    ("Validation", "sum of recalls", "validation", ("rsum",)),
    ("Learning rate", "rate", "train", ("lr",)),
    ("Gradient of first image layer", "norm", "train", ("image_grad_norm",)),
    ("Gap to the hardest negative", "mean score difference", "train", ("hardest_gap",)),
    ("Distance to the hardest negative", "mean distance", "train", ("hardest_distance",)),
    ("Cosine within images and captions", "mean cosine", "train", ("image_cosine", "caption_cosine")),
    (
        "Anchors with hardest negative",
        "share in percent",
        "train",
        ("i2t_hardest_share", "t2i_hardest_share"),
    ),
    ("Risk of the discriminators", "mean risk", "train", ("domain_risk",)),
)
_COLUMNS = 3
_MAX_NAME = 120


def write_comparison(path: str | os.PathLike[str], runs: Mapping[str, Metrics]) -> None:
    """Plot the logs of several runs over each other: loss, recall, learning rate, gradient norm, mining, ADDR's risk.

    A panel is left out if no run has its numbers, or if all are 0, such as the shares of hardest negatives of a loss
    over all negatives. The loss is that of the last kind of negatives: sums over other negatives, as in a warm-up, are
    not comparable. Shares are the mean of both directions, cosines that of both modalities.

    Args:
        path: figure to write, atomically; the suffix, one of `SUFFIXES`, selects the format.
        runs: lines of `metrics.jsonl` by the names for the legend.

    Raises:
        ValueError: the suffix is unknown, there is no run, or a run's log has none of the numbers.
    """
    check_suffix(path)
    if not runs:
        raise ValueError("runs: expected at least one, got none")
    panels = [panel for panel in _PANELS if any(any(_points(log, panel[2], panel[3])[1]) for log in runs.values())]
    for name, metrics in runs.items():
        if not any(_points(metrics, panel[2], panel[3])[0] for panel in panels):
            raise ValueError(f"{name}: the log has none of the numbers that the figure shows")
    columns = min(len(panels), _COLUMNS)
    rows = math.ceil(len(panels) / columns)
    with write_figure(path, list(runs), size=(4.0 * columns, 2.8 * rows)) as figure:
        for place, panel in enumerate(panels, start=1):
            _draw(figure.add_subplot(rows, columns, place), *panel, runs)


@contextlib.contextmanager
def write_figure(
    path: str | os.PathLike[str], names: Sequence[str], *, size: tuple[float, float], points: bool = False
) -> Iterator[Figure]:
    """Yield an empty figure to draw on; at the end of the block add a legend and write the file atomically.

    Args:
        path: file to write; the suffix selects the format.
        names: names of the runs for the legend, in the order of `line_style`.
        size: width and height in inches.
        points: draw runs as points in `point_style`, instead of lines.

    Raises:
        ValueError: the suffix is not one of `SUFFIXES`.
    """
    suffix = check_suffix(path)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        style = point_style if points else line_style
        _add_legend(figure, [mpl.lines.Line2D([], [], **style(number)) for number in range(len(names))], names)
        metadata = {"Date": None, "Creator": None} if suffix == ".svg" else None
        with atomic.atomic_file(path) as file:
            figure.savefig(file, format=suffix[1:], dpi=150, metadata=metadata)


def _add_legend(figure: Figure, handles: Sequence[mpl.lines.Line2D], names: Sequence[str]) -> None:
    """Add a legend below the figure, in as many columns as fit its width, at most four."""
    for columns in range(min(len(handles), 4), 0, -1):
        numbers = [str(number) for number in range(len(names))]
        legend = figure.legend(handles, numbers, loc="outside lower center", ncols=columns, frameon=False)
        # Set the names afterwards: Matplotlib skips labels that begin with an underscore.
        for text, name in zip(legend.get_texts(), names, strict=True):
            text.set_parse_math(False)
            text.set_text(shortened(printable(name), _MAX_NAME))
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def check_suffix(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a figure; raise ValueError if it is not one of `SUFFIXES`."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: expected a name that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    return suffix


def _draw(axes: Axes, title: str, label: str, kind: str, keys: tuple[str, ...], runs: Mapping[str, Metrics]) -> None:
    factor = 100 if label.endswith("percent") else 1
    lowest: list[float] = []
    highest: list[float] = []
    for number, metrics in enumerate(runs.values()):
        steps, values = _points(metrics, kind, keys)
        if steps:
            x, y = _means(steps), factor * _means(values)
            lowest.append(float(y.min()))
            highest.append(float(y.max()))
            axes.plot(x, y, marker="o" * (len(x) < 3), clip_on=factor == 1, **line_style(number))
    # Losses sum over different numbers of negatives, so runs may differ by powers of ten.
    logarithmic = label in ("loss", "norm") and 0 < 10 * min(lowest, default=0.0) < max(highest, default=0.0)
    axes.set_yscale("log" if logarithmic else "linear")
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.set_xlim(left=0)
    if not logarithmic:
        axes.set_ylim(bottom=min([0.0, *lowest]), top=100 if factor == 100 else None)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    axes.tick_params(length=0)


def _points(metrics: Metrics, kind: str, keys: tuple[str, ...]) -> tuple[list[float], list[float]]:
    lines = [line for line in metrics if line["kind"] == kind and all(key in line for key in keys)]
    if keys == ("loss",):
        lines = [line for line in lines if line.get("mining") == lines[-1].get("mining")]
    lines = list(without_rest(lines)) if kind == "train" else lines
    return [line["step"] for line in lines], [sum(line[key] for key in keys) / len(keys) for line in lines]


def _means(values: Sequence[float]) -> np.ndarray:
    """Average groups of neighbours, equal in size, so that at most `_POINTS` points remain."""
    parts = math.ceil(len(values) / math.ceil(len(values) / _POINTS))
    return np.array([part.mean() for part in np.array_split(np.asarray(values, float), parts)])


def line_style(number: int) -> dict[str, Any]:
    """Return the colour and line style of run `number` (from 0), as Matplotlib options."""
    style = _STYLES[number % len(_STYLES)]
    return {"color": _COLOURS[number % len(_COLOURS)], "linestyle": style, "linewidth": 1.7, "markersize": 5}


def point_style(number: int) -> dict[str, Any]:
    """Return the colour and marker of run `number` (from 0), as Matplotlib options without a line."""
    marker = _MARKERS[number % len(_MARKERS)]
    style: dict[str, Any] = {"marker": marker, "markersize": 3, "markeredgewidth": 0, "alpha": 0.6}
    return {"color": _COLOURS[number % len(_COLOURS)], "linestyle": "none", **style}
