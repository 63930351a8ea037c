"""Data that a run's result keeps in addition to recalls, so that figures need no run directory: small, plain numbers.

Inside: `training_curves`, `as_metrics`, `score_histogram`, `as_text`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_metrics", "as_text", "score_histogram", "training_curves"]

# Logged values to keep, by the kind of line.
_CURVES = {
    "train": (
        "step", "loss", "image_grad_norm", "hardest_gap", "i2t_hardest_share", "t2i_hardest_share",
        "hardest_distance", "image_cosine", "caption_cosine",
    ),
    "validation": ("step", "rsum", "mean_distance"),
}  # fmt: skip
# Logged by ADDR, and by FDF with realignment: the discriminators' risk, and the loss of the fused feature.
_OF_SOME = ("domain_risk", "online_loss")
_BIN_WIDTH, _MAX_BINS = 0.02, 400


def training_curves(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float | None]]]:
    """Return the log of a run as columns of numbers with five digits, None where a line lacks one.

    Only runs of ADDR have the risk of their discriminators, and only those of FDF with realignment the loss of the
    fused feature.

    Args:
        metrics: the lines of `metrics.jsonl`.
    """
    curves = {
        kind: {name: [_short(line.get(name)) for line in metrics if line["kind"] == kind] for name in names}
        for kind, names in _CURVES.items()
    }
    for name in _OF_SOME:
        if any(name in line for line in metrics):
            curves["train"][name] = [_short(line.get(name)) for line in metrics if line["kind"] == "train"]
    return curves


def _short(value: float | None) -> float | None:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def as_metrics(curves: Mapping[str, Mapping[str, Sequence[float | None]]]) -> list[dict[str, Any]]:
    """Return lines of a log from the output of `training_curves`."""
    lines = []
    for kind, columns in curves.items():
        for values in zip(*columns.values(), strict=True):
            numbers = dict(zip(columns, values, strict=True))
            lines.append({"kind": kind, **{name: value for name, value in numbers.items() if value is not None}})
    return lines


def score_histogram(scores: Tensor, caption_image: Tensor) -> dict[str, Any] | None:
    """Count positive and negative pairs by score: Figures 6 and 7 of Deep Boosting Learning.

    Args:
        scores: (n_images, n_captions).
        caption_image: int64 (n_captions,), the image that each caption belongs to.

    Returns:
        `positive` and `negative`, counts of the bins around `width (first + index)`. Bins of different runs coincide.
        They are wider than 0.02 only if there would be too many; None if a score is not finite.
    """
    if not scores.numel() or not bool(scores.isfinite().all()):
        return None
    width = _BIN_WIDTH
    while float(scores.max() - scores.min()) / width > _MAX_BINS - 2:
        width *= 2
    bins = (scores.double() / width).round().long()
    first, count = int(bins.min()), int(bins.max() - bins.min()) + 1
    own = torch.arange(scores.shape[0])[:, None] == caption_image
    found = {
        name: torch.bincount(bins[chosen] - first, minlength=count).tolist()
        for name, chosen in (("positive", own), ("negative", ~own))
    }
    return {"width": width, "first": first, **found}


def as_text(result: Mapping[str, Any]) -> str:
    """Return a result as JSON, each list of numbers in one line."""
    text = json.dumps(result, indent=2)
    return re.sub(r"\[[\s\d.,e+\-nul]*\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text) + "\n"
