"""Renders a report as one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import io
import os
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from itm_fast import files
from itm_fast.report.content import Report
from itm_fast.report.curves import curves_svg
from itm_fast.report.heat import heat, peak

__all__ = ["render_report", "write_report"]

_RECALLS = ("r1", "r5", "r10")
_DIRECTIONS = (("i2t", "Image to text"), ("t2i", "Text to image"))


def write_report(path: str | os.PathLike[str], report: Report) -> None:
    """Writes `report` as HTML, atomically."""
    files.write_text(path, render_report(report))


def render_report(report: Report) -> str:
    """The page. Every text of the data is escaped by the template engine; the curves' SVG is our own."""
    environment = Environment(
        loader=PackageLoader("itm_fast.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        report=report,
        pictures={index: _png_uri(pixels) for index, pixels in report.pictures.items()},
        curves=[(title, Markup(svg)) for title, svg in curves_svg(report.metrics)],
        table=_table(report),
        attention=_attention(report),
    )


def _attention(report: Report) -> list[dict[str, Any]]:
    """Each picture with its words, and for each word the picture in its light and where it is brightest."""
    drawn = []
    for example in report.attention:
        tiles = []
        for word, weights in zip(example.words, example.weights, strict=True):
            row, column, weight = peak(weights)
            where = f"most attention in row {row}, column {column} of {weights.shape[0]} x {weights.shape[1]}"
            light = _png_uri(heat(report.pictures[example.picture], weights))
            tiles.append({"word": word, "image": light, "where": where, "share": f"{100 * weight:.0f} %"})
        drawn.append({"picture": example.picture, "caption": example.caption, "tiles": tiles})
    return drawn


def _table(report: Report) -> list[dict[str, Any]]:
    """The two directions, each with a row of values per summary."""
    table = []
    for prefix, direction in _DIRECTIONS:
        rows = []
        for label, summary in (("trained", report.trained), ("untrained", report.untrained)):
            values = [f"{summary[f'{prefix}_{recall}']:.1f}" for recall in _RECALLS]
            rows.append((label, [*values, f"{summary[f'{prefix}_medr']:.0f}"]))
        table.append({"direction": direction, "rows": rows})
    return table


def _png_uri(pixels: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
