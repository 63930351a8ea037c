"""Triplet losses in plain Python loops over floats: the reference for PyTorch code and kernels.

Inside: `loop_losses`, `loop_hardest`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def loop_hardest(negatives: dict[int, float]) -> tuple[float, int]:
    """Return the hardest of `{index: score}`: the first NaN if any, else the first maximum; (-inf, -1) if empty."""
    best, where = -math.inf, -1
    for index in sorted(negatives):
        score = negatives[index]
        if math.isnan(score):
            return score, index
        if where < 0 or score > best:
            best, where = score, index
    return best, where


def loop_losses(
    scores: Tensor,
    *,
    margin: float = 0.2,
    mining: str = "hardest",
    epsilon: float = 0.01,
    selective_divisor: str = "batch",
    halve: bool = False,
    positives: Tensor | None = None,
    positive_scores: Tensor | None = None,
    directions: str = "both",
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss of every anchor and the gradient of their weighted sum.

    Args:
        weights: (directions, B), the incoming gradient of every anchor; ones by default.

    Returns:
        float64 losses (directions, B), gradient of the scores (n, m), and gradient of the anchors' positive scores
        (B,). If the positives are on the diagonal, the gradient of the scores includes the latter.
    """
    values = scores.double().tolist()
    n, m = scores.shape
    masked = positives.tolist() if positives is not None else [[False] * m for _ in range(n)]
    diagonal = positive_scores is None
    own = [values[i][i] for i in range(n)] if diagonal else positive_scores.double().tolist()
    gradient = torch.zeros(n, m, dtype=torch.float64)
    own_gradient = torch.zeros(len(own), dtype=torch.float64)
    losses = []
    factor = 0.5 if halve else 1.0
    sides = [side for side in ("rows", "columns") if directions in ("both", side)]
    for position, side in enumerate(sides):
        rows = side == "rows"
        losses.append([])
        for anchor in range(n if rows else m):
            negatives = {}
            for other in range(m if rows else n):
                i, j = (anchor, other) if rows else (other, anchor)
                if not masked[i][j] and not (diagonal and i == j):
                    negatives[other] = values[i][j]
            batch = (m if rows else n) + (not diagonal)
            divisor = max(batch - (selective_divisor == "negatives"), 1)
            loss, slopes, own_slope = _anchor(own[anchor], negatives, margin, mining, epsilon, divisor)
            weight = factor * (float(weights[position, anchor]) if weights is not None else 1.0)
            losses[-1].append(factor * loss)
            for other, slope in slopes.items():
                gradient[(anchor, other) if rows else (other, anchor)] += weight * slope
            if own_slope:
                own_gradient[anchor] += weight * own_slope
    if diagonal:
        gradient.diagonal().add_(own_gradient)
    return torch.tensor(losses, dtype=torch.float64).reshape(len(sides), -1), gradient, own_gradient


def _hinge(margin: float, negative: float, positive: float) -> float:
    value = margin + negative - positive
    return 0.0 if value <= 0 else value


def _anchor(
    positive: float, negatives: dict[int, float], margin: float, mining: str, epsilon: float, divisor: int
) -> tuple[float, dict[int, float], float]:
    """Return the loss of one anchor, and its derivatives by each negative and by the positive."""
    if mining == "semi_hard":
        negatives = {index: score for index, score in negatives.items() if not score >= positive}
    if not negatives:
        return (positive if math.isnan(positive) else 0.0), {}, 0.0
    hinges = {index: _hinge(margin, score, positive) for index, score in negatives.items()}
    active = [index for index, value in hinges.items() if value != 0.0]
    if mining == "all":
        return sum(hinges.values()), dict.fromkeys(active, 1.0), -float(len(active))
    hardest, where = loop_hardest(negatives)
    if mining == "selective" and epsilon != 0 and not abs(hardest - positive) > epsilon:
        return sum(hinges.values()) / divisor, dict.fromkeys(active, 1.0 / divisor), -len(active) / divisor
    if mining == "sct" and hardest >= positive:
        return hardest, {where: 1.0}, 0.0
    if hinges[where] == 0.0:
        return 0.0, {}, 0.0
    return hinges[where], {where: 1.0}, -1.0
