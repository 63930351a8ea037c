"""A figure of all claims of a paper: mean differences of the sums of recalls with their intervals.

Inside: `draw_claims`, `source`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks.experiments.figures import sign, source_line
from benchmarks.experiments.verdicts import Verdict
from itm_fast.report.comparison import point_style, write_figure

__all__ = ["draw_claims", "source"]

# Verdicts in the order of the legend.
_WORDS = ("open", "fails", "holds")
# Differences shown. A mean beyond has its marker at the edge, with its number.
_LIMIT = 60.0
_INSET = 1.2  # From the edge to the centre of such a marker.
_ROW = 0.19  # Inches.


def draw_claims(path: Path, found: Sequence[Verdict]) -> None:
    """Draw claims by the sum of recalls, from top to bottom; the last line of the file identifies what it shows.

    Claims that were compared by other measures, or have no interval, are left out.
    """
    shown = _shown(found)
    with write_figure(path, _WORDS, size=(9.6, 1.2 + _ROW * len(shown)), points=True) as figure:
        axes = figure.subplots()
        for row, verdict in enumerate(shown):
            _draw(axes, row, verdict)
        axes.axvline(0.0, color="#000000", linewidth=0.8)
        axes.set_yticks(range(len(shown)), [one.claim.text for one in shown], fontsize=8.5)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlim(-_LIMIT, _LIMIT)
        axes.set_xlabel("difference of the sums of recalls")
        axes.tick_params(length=0)
        axes.grid(axis="y", visible=False)
    sign(path, _kept(found))


def source(found: Sequence[Verdict]) -> str:
    """Return the last line of a figure of these verdicts."""
    return source_line(_kept(found))


def _kept(found: Sequence[Verdict]) -> list[list[str | float]]:
    return [
        [one.claim.text, one.word, *(round(value, 3) for value in (one.mean, *(one.interval or ())))]
        for one in _shown(found)
    ]


def _shown(found: Sequence[Verdict]) -> list[Verdict]:
    return [one for one in found if one.claim.of == "rsum" and one.interval is not None]


def _draw(axes: Axes, row: int, verdict: Verdict) -> None:
    assert verdict.interval is not None
    style = point_style(_WORDS.index(verdict.word)) | {"alpha": 1.0, "markersize": 4.5}
    axes.plot(verdict.interval, [row, row], color=style["color"], linewidth=1.4)
    if abs(verdict.mean) < _LIMIT:
        axes.plot([verdict.mean], [row], **style)
        return
    side = 1 if verdict.mean > 0 else -1
    edge = side * (_LIMIT - _INSET)
    axes.plot([edge], [row], **style)
    axes.annotate(
        f"{verdict.mean:+.0f}", (edge, row), (-5 * side, 0), textcoords="offset points", fontsize=8.5,
        ha="right" if side > 0 else "left", va="center", color=style["color"],
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
    )  # fmt: skip
