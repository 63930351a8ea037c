"""Render a report as one self-contained HTML file."""

from __future__ import annotations

import os
from typing import Any

from markupsafe import Markup

from itm_fast.files import atomic
from itm_fast.report.content import Report
from itm_fast.report.curves import curves_svg
from itm_fast.report.heat import heat, peak
from itm_fast.report.page import png_uri, render

__all__ = ["render_report", "write_report"]

_RECALLS = ("r1", "r5", "r10")
_DIRECTIONS = (("i2t", "Image to text"), ("t2i", "Text to image"))


def write_report(path: str | os.PathLike[str], report: Report) -> None:
    """Write `report` as HTML, atomically."""
    atomic.write_text(path, render_report(report))


def render_report(report: Report) -> str:
    """Return the page. The template engine escapes all texts of the data; `curves_svg` escapes its own."""
    return render(
        "report.html.j2",
        report=report,
        pictures={index: png_uri(pixels) for index, pixels in report.pictures.items()},
        curves=[(title, Markup(svg)) for title, svg in curves_svg(report.metrics)],
        table=_table(report),
        attention=_attention(report),
    )


def _attention(report: Report) -> list[dict[str, Any]]:
    """Return each picture and, for each word, the picture lit by its attention and the brightest patch."""
    drawn = []
    for example in report.attention:
        tiles = []
        for word, weights in zip(example.words, example.weights, strict=True):
            row, column, weight = peak(weights)
            where = f"most attention in row {row}, column {column} of {weights.shape[0]} x {weights.shape[1]}"
            light = png_uri(heat(report.pictures[example.picture], weights))
            tiles.append({"word": word, "image": light, "where": where, "share": f"{100 * weight:.0f} %"})
        drawn.append({"picture": example.picture, "caption": example.caption, "tiles": tiles})
    return drawn


def _table(report: Report) -> list[dict[str, Any]]:
    """Return the rows of the recall table: one group per direction, one row per summary."""
    table = []
    for prefix, direction in _DIRECTIONS:
        rows = []
        for label, summary in (("trained", report.trained), ("untrained", report.untrained)):
            if summary is None:
                continue
            values = [f"{summary[f'{prefix}_{recall}']:.1f}" for recall in _RECALLS]
            rows.append((label, [*values, f"{summary[f'{prefix}_medr']:.0f}"]))
        table.append({"direction": direction, "rows": rows})
    return table
