"""The report of given scores as one self-contained HTML file.

Inside: `render_scores`, `write_scores`.
"""

from __future__ import annotations

import os

from itm_fast.files import atomic
from itm_fast.report.content import ScoreReport
from itm_fast.report.page import png_uri, render

__all__ = ["render_scores", "write_scores"]


def write_scores(path: str | os.PathLike[str], report: ScoreReport) -> None:
    """Write `report` as HTML, atomically."""
    atomic.write_text(path, render_scores(report))


def render_scores(report: ScoreReport) -> str:
    """Return the page. The template engine escapes all texts of the data."""
    pictures = {index: png_uri(pixels) for index, pixels in report.pictures.items()}
    return render("scores.html.j2", report=report, pictures=pictures)
