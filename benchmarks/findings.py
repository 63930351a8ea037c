"""Findings of experiments on the bundled data, as sentences with figures from the committed results.

Inside: `selhn_gradients`, `fdf`. `benchmarks.render` writes them into the docs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "experiments"
SEEDS = (0, 1, 2)
MODELS = {"VSE (FC)": "vse-fc", "RVSE (MLP)": "rvse-mlp"}


def run(experiment: str, row: str, seed: int | None = 0) -> dict[str, Any]:
    """Return the result of one run, or of an ensemble if `seed` is None."""
    name = row if seed is None else f"{row}-seed{seed}"
    found: dict[str, Any] = json.loads((RESULTS / experiment / f"{name}.json").read_text())
    return found


def rsum(experiment: str, row: str, seed: int | None = 0) -> float:
    """Return the sum of the six recalls on test."""
    found: float = run(experiment, row, seed)["test"]["rsum"]
    return found


def rsums(experiment: str, row: str, seeds: Sequence[int] = SEEDS) -> list[float]:
    return [rsum(experiment, row, seed) for seed in seeds]


def median(experiment: str, row: str, seed: int, name: str, first: int, last: int) -> float:
    """Return the median of a logged number over the steps from `first` to `last`."""
    curves = run(experiment, row, seed)["curves"]["train"]
    return statistics.median(
        value for value, step in zip(curves[name], curves["step"], strict=True) if first <= step <= last
    )


def between(values: Sequence[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def listed(values: Sequence[float]) -> str:
    """Join the values as "1.0, 2.0 and 3.0"."""
    texts = [f"{value:.1f}" for value in values]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def selhn_gradients() -> str:
    """Render gradient norms of the first image layer and gaps to the hardest negative, in five bands of epochs."""
    firsts, length, per_epoch = (1, 5, 9, 13, 17), 4, 110
    heads = [f"epochs {first} to {first + length - 1}" for first in firsts]
    lines = [f"|  | {' | '.join(heads)} |", f"| --- {'| ---: ' * len(firsts)}|"]
    bands = [((first - 1) * per_epoch + 1, (first + length - 1) * per_epoch) for first in firsts]
    for title, name, digits in (("gradient", "image_grad_norm", 1), ("gap", "hardest_gap", 3)):
        for model, row in MODELS.items():
            for loss in ("HN", "SelHN"):
                of_bands = [
                    [median("selhn-claims", f"{row}-{loss.lower()}", seed, name, *band) for seed in SEEDS]
                    for band in bands
                ]
                cells = [between(values, digits) for values in of_bands]
                lines.append(f"| {title}, {model}: {loss} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def fdf() -> str:
    host, full = rsums("fdf", "chan", range(4)), rsums("fdf", "n-2-fc-rts-rw-fdf")
    counts = [rsum("fdf", "fdf-n-1"), full[0], rsum("fdf", "fdf-n-4"), rsum("fdf", "fdf-n-8")]
    ensembles = [rsum("fdf", f"chan-mean-scores-of-{name}", None) for name in ("two", "four")]
    forms = [rsum("fdf", f"n-2-{name}-in-place-of-ffn") for name in ("none", "adapter")]
    kept = rsum("fdf", "fdf-other-batches-kept")
    return (
        f"At this size and budget FDF does not improve its host, CHAN. CHAN reaches {statistics.mean(host):.1f} in the "
        f"mean of four seeds (standard deviation {statistics.stdev(host):.1f}), FDF with two conversions "
        f"{statistics.mean(full):.1f} in the mean of three ({statistics.stdev(full):.1f}). The other rows have one "
        f"seed.\n\n"
        f"- **Parts** (Table 3), seed 0: CHAN {host[0]:.1f}; two conversions (FC) {rsum('fdf', 'n-2-fc'):.1f}; with "
        f"realignment (RTS) {rsum('fdf', 'n-2-fc-rts'):.1f}; with weights (RW) {full[0]:.1f}.\n"
        f"- **Forms** (Table 4): no network {forms[0]:.1f}, adapter {forms[1]:.1f}, feed-forward network "
        f"{full[0]:.1f}.\n"
        f"- **Number of conversions** (Figure 4): {listed(counts)} with one, two, four and eight. Ensembles of two and "
        f"four models of CHAN reach {listed(ensembles)}.\n"
        f"- `--other-batches kept` reaches {kept:.1f}, {kept - full[0]:+.1f} against `fresh`.\n"
    )
