"""Gradient norms of SelHN's experiment over the epochs, as a table from the committed results.

Inside: `markdown`. `benchmarks.render` writes it into the docs.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "experiments" / "selhn-claims"
MODELS = {"VSE (FC)": "vse-fc", "RVSE (MLP)": "rvse-mlp"}
SEEDS = range(5)
BANDS, STEPS_PER_EPOCH = [(first, first + 3) for first in (1, 5, 9, 13, 17)], 110


def markdown() -> str:
    """Render gradient norms of the first image layer and gaps to the hardest negative, in five bands of epochs."""
    heads = [f"epochs {first} to {last}" for first, last in BANDS]
    lines = [f"|  | {' | '.join(heads)} |", f"| --- {'| ---: ' * len(BANDS)}|"]
    for title, name, digits in (("gradient", "image_grad_norm", 1), ("gap", "hardest_gap", 3)):
        for model, row in MODELS.items():
            for loss in ("HN", "SelHN"):
                cells = [_spread(f"{row}-{loss.lower()}", name, band, digits) for band in BANDS]
                lines.append(f"| {title}, {model}: {loss} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(row: str, name: str, band: tuple[int, int], digits: int) -> str:
    """Return the lowest and highest median of the seeds, of a logged number over the epochs of a band."""
    first, last = (band[0] - 1) * STEPS_PER_EPOCH + 1, band[1] * STEPS_PER_EPOCH
    medians = []
    for seed in SEEDS:
        curves = json.loads((RESULTS / f"{row}-seed{seed}.json").read_text())["curves"]["train"]
        logged = zip(curves["step"], curves[name], strict=True)
        medians.append(statistics.median(value for step, value in logged if first <= step <= last))
    return f"{min(medians):.{digits}f} to {max(medians):.{digits}f}"
