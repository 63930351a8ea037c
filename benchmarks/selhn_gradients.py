"""Gradient norms of SelHN's experiment over the epochs, as a table from the committed results.

Inside: `markdown`. `benchmarks.render` writes it into the docs.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "experiments" / "selhn-claims"
SEEDS = {"VSE (FC)": range(5), "VSE (MLP)": range(3), "RVSE (MLP)": range(5)}
BANDS, STEPS_PER_EPOCH = [(first, first + 3) for first in (1, 5, 9, 13, 17)], 110


def markdown() -> str:
    """Render gradient norms of the first image layer and gaps to the hardest negative, in five bands of epochs."""
    heads = [f"epochs {first} to {last}" for first, last in BANDS]
    lines = [f"|  | {' | '.join(heads)} |", f"| --- {'| ---: ' * len(BANDS)}|"]
    for title, name, digits in (("gradient", "image_grad_norm", 1), ("gap", "hardest_gap", 3)):
        for model, seeds in SEEDS.items():
            row = model.lower().replace(" (", "-").rstrip(")")
            for loss in ("HN", "SelHN"):
                files = [RESULTS / f"{row}-{loss.lower()}-seed{seed}.json" for seed in seeds]
                cells = [_spread(files, name, band, digits) for band in BANDS]
                lines.append(f"| {title}, {model}: {loss} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(files: list[Path], name: str, band: tuple[int, int], digits: int) -> str:
    """Return the lowest and highest median of runs, of a logged number over the epochs of a band."""
    first, last = (band[0] - 1) * STEPS_PER_EPOCH + 1, band[1] * STEPS_PER_EPOCH
    medians = []
    for file in files:
        curves = json.loads(file.read_text())["curves"]["train"]
        logged = zip(curves["step"], curves[name], strict=True)
        medians.append(statistics.median(value for step, value in logged if first <= step <= last))
    return f"{min(medians):.{digits}f} to {max(medians):.{digits}f}"
