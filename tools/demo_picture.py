"""Draw the picture of the README from a finished demo: eight captions and the five best of its 500 unseen pictures.

    itm-fast demo --out runs/demo
    python tools/demo_picture.py runs/demo docs/images/demo.png

The captions are the first eight of the demo's report.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from itm_fast import evaluation, models
from itm_fast.data import PrecomputedDataset, Vocabulary, emoji
from itm_fast.files import atomic
from itm_fast.report import TextQuery
from itm_fast.report.of_run import HITS, searches
from itm_fast.training import run_folder

QUERIES, COLUMNS = 8, 2
LONGEST = 54  # characters of a caption that fit
# All in pixels.
MARGIN, GAP, WIDTH, HEIGHT = 16, 14, 466, 140
PICTURE, STEP, APART = 64, 71, 10
GREEN, INK, GREY, LINE, PAPER = "#0a6b45", "#1c1c1e", "#6b6b6b", "#dddbd6", "#f5f4f1"


def draw(path: str | os.PathLike[str], queries: Sequence[TextQuery], pictures: Mapping[int, np.ndarray]) -> None:
    """Draw a card for each query: its caption, and its pictures with their ranks, the right one in green.

    A right picture that is added after the `HITS` best ones stands apart.

    Args:
        path: PNG file to write, atomically.
        queries: captions with the pictures found for them.
        pictures: uint8 (height, width, 3) by number.
    """
    rows = -(-len(queries) // COLUMNS)
    width = 2 * MARGIN + COLUMNS * WIDTH + (COLUMNS - 1) * GAP
    height = 2 * MARGIN + rows * HEIGHT + (rows - 1) * GAP
    figure = Figure(figsize=(width / 100, height / 100), facecolor=PAPER)
    FigureCanvasAgg(figure)
    page = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    page.axis("off")
    caption = {"size": 9.8, "weight": "bold", "color": INK, "va": "center", "parse_math": False}
    for number, query in enumerate(queries):
        row, column = divmod(number, COLUMNS)
        left, top = MARGIN + column * (WIDTH + GAP), MARGIN + row * (HEIGHT + GAP)
        page.add_patch(_frame(left, top, WIDTH, HEIGHT, LINE, 1.0, 10))
        page.text(left + 16, top + 24, textwrap.shorten(query.caption, LONGEST, placeholder="…"), **caption)
        for place, hit in enumerate(query.hits):
            x, y = left + 16 + place * STEP + APART * (place >= HITS), top + 42
            colour = GREEN if hit.right else LINE
            page.add_patch(_frame(x, y, PICTURE, PICTURE, colour, 2.2 if hit.right else 1.0, 8))
            page.imshow(pictures[hit.item], extent=(x + 5, x + PICTURE - 5, y + PICTURE - 5, y + 5), zorder=2)
            page.text(
                x + PICTURE / 2, y + PICTURE + 14, f"{'✓' if hit.right else '✗'} {hit.rank}", size=8, ha="center",
                va="center", color=GREEN if hit.right else GREY, weight="bold" if hit.right else "normal",
            )  # fmt: skip
    with atomic.atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=100)


def _frame(
    left: float, top: float, width: float, height: float, colour: str, line: float, radius: float
) -> FancyBboxPatch:
    style = f"round,pad=0,rounding_size={radius}"
    return FancyBboxPatch((left, top), width, height, style, facecolor="white", edgecolor=colour, linewidth=line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the demo")
    parser.add_argument("file", type=Path, help="PNG file to write")
    options = parser.parse_args()
    atomic.check_target(options.file)
    config = run_folder.saved_config(options.run)
    test = PrecomputedDataset(config.data, "test", Vocabulary.from_file(options.run / run_folder.VOCABULARY))
    model = models.load(options.run)
    scores = evaluation.score_matrix(model, test, progress=True, description="test")
    found = searches(model, test, scores, config.seed, emoji.pictures("test").__getitem__, emoji.names("test"))
    draw(options.file, found["text_queries"][:QUERIES], found["pictures"])


if __name__ == "__main__":
    main()
