"""Figures of the results of benchmarks/experiments/__main__.py, as SVG.

Inside: `draw`, `figures_there`; `sign` and `source_line` for other figures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.experiments.files import Experiment, Figure, shown_path
from benchmarks.experiments.results import result_of
from benchmarks.experiments.traces import as_metrics
from itm_fast.files import atomic
from itm_fast.report.comparison import line_style, write_comparison, write_figure

__all__ = ["draw", "figures_there", "sign", "source_line"]

_KEPT = {"training": "curves", "scores": "scores"}


def draw(experiment: Experiment, figure: Figure, results: Path) -> None:
    """Draw a figure of the results in a folder; the last line of the file identifies its inputs.

    Raises:
        ValueError: as `result_of`, a run is missing, or its result lacks the data of the figure.
    """
    path = figure.path
    kept = _kept(experiment, figure, results)
    if figure.shows == "training":
        write_comparison(path, {row: as_metrics(curves) for row, curves in kept.items()})
    else:
        _write_scores(path, kept)
    sign(path, kept)


def figures_there(experiment: Experiment, results: Path) -> list[Figure]:
    """Return the figures that can be drawn; ValueError naming a missing one, or one of other results."""
    there = []
    for figure in experiment.figures:
        drawn = figure.path.read_text(encoding="utf-8").splitlines()[-1:] if figure.path.is_file() else None
        if drawn is None and any(result_of(experiment, run, results) is None for run in figure.runs):
            continue
        if drawn != [source_line(_kept(experiment, figure, results))]:
            command = f"python -m benchmarks.experiments figures {shown_path(experiment.path)}"
            raise ValueError(f"{shown_path(figure.path)}: is out of date; draw it again: {command}")
        there.append(figure)
    return there


def _kept(experiment: Experiment, figure: Figure, results: Path) -> dict[str, Any]:
    kept = {}
    for run in figure.runs:
        result = result_of(experiment, run, results)
        if result is None:
            raise ValueError(f"{figure.file}: {run.row}, seed {run.seed}, has no result")
        kept[run.row] = result.get(_KEPT[figure.shows])
        if kept[run.row] is None:
            raise ValueError(f"{figure.file}: the result of {run.row}, seed {run.seed}, keeps no {figure.shows}")
    return kept


def sign(path: Path, kept: Mapping[str, Any] | Sequence[Any]) -> None:
    """Append the line that identifies the data of a figure to its file."""
    atomic.write_text(path, f"{path.read_text(encoding='utf-8').rstrip()}\n{source_line(kept)}\n")


def source_line(kept: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return the last line of a figure of these data."""
    return f"<!-- drawn from {hashlib.sha256(json.dumps(kept).encode()).hexdigest()} -->"


def _write_scores(path: Path, histograms: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw positive pairs on the left, negative ones on the right, as shares of all of them by score."""
    with write_figure(path, list(histograms), size=(9.0, 3.6)) as figure:
        for axes, kind in zip(figure.subplots(1, 2), ("positive", "negative"), strict=True):
            _draw_scores(axes, kind, histograms)


def _draw_scores(axes: Axes, kind: str, histograms: Mapping[str, Mapping[str, Any]]) -> None:
    for number, histogram in enumerate(histograms.values()):
        counts, width = histogram[kind], histogram["width"]
        scores = [width * (histogram["first"] + index) for index in range(-1, len(counts) + 1)]
        # Per 0.02 of the score, so that bins of different widths are comparable; the curve ends at zero.
        share = 100 / max(sum(counts), 1) * 0.02 / width
        axes.plot(scores, [0.0, *(share * count for count in counts), 0.0], **line_style(number))
    axes.set_title(f"{kind.capitalize()} pairs", loc="left")
    axes.set_xlabel("score")
    axes.set_ylabel("percent of the pairs per 0.02")
    axes.set_ylim(bottom=0)
    axes.tick_params(length=0)
