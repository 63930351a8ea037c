"""t-SNE: rows of many numbers as points of a plane in which neighbours stay neighbours.

Inside: `neighbour_embedding`, `principal_components`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["neighbour_embedding", "principal_components"]

# Steps and rates of the descent, as van der Maaten and Hinton chose them.
_STEPS, _EARLY_STEPS, _EXAGGERATION = 750, 250, 12.0
_EARLY_MOMENTUM, _MOMENTUM = 0.5, 0.8
_GAIN, _LOSS, _LEAST_GAIN = 0.2, 0.8, 0.01


def neighbour_embedding(rows: Tensor, perplexity: float = 30.0) -> Tensor:
    """Place rows in the plane by exact t-SNE, which takes n^2 memory and time.

    The descent starts from the first two principal components, so that the same rows give the same points.

    Args:
        rows: `(n, d)`.
        perplexity: effective number of neighbours of a row. With few rows it is a third of their number.

    Returns:
        float64 `(n, 2)`.

    Source: van der Maaten and Hinton, "Visualizing Data using t-SNE" (JMLR 2008).
    """
    n = len(rows)
    shares = joint_shares(rows.double(), min(perplexity, (n - 1) / 3))
    points = principal_components(rows)
    points = points * (1e-4 / points.std(0)[:1].clamp(min=1e-12))
    rate = max(n / _EXAGGERATION / 4, 50.0)
    velocity, gains = torch.zeros_like(points), torch.ones_like(points)
    for step in range(_STEPS):
        early = step < _EARLY_STEPS
        slope = gradient(shares * (_EXAGGERATION if early else 1.0), points)
        # A coordinate that goes on in its direction speeds up; one that turns slows down.
        onward = slope.sign() != velocity.sign()
        gains = torch.where(onward, gains + _GAIN, gains * _LOSS).clamp(min=_LEAST_GAIN)
        velocity = (_EARLY_MOMENTUM if early else _MOMENTUM) * velocity - rate * gains * slope
        points = points + velocity
        points = points - points.mean(0)
    return points


def joint_shares(rows: Tensor, perplexity: float) -> Tensor:
    """Return p_ij of rows (n, d), (n, n), which sum to 1: the mean of p(j|i) and p(i|j), divided by n.

    p(j|i) is proportional to exp(-b_i |x_i - x_j|^2), without j = i. b_i gives the distribution this perplexity.
    """
    n = len(rows)
    distances = torch.cdist(rows, rows).square()
    distances = distances / distances.mean().clamp(min=1e-300)
    itself = torch.eye(n, dtype=torch.bool)
    least, most = torch.full((n, 1), -40.0, dtype=torch.float64), torch.full((n, 1), 40.0, dtype=torch.float64)
    for _ in range(60):  # Bisection for log b_i.
        middle = (least + most) / 2
        logits = (-middle.exp() * distances).masked_fill(itself, -math.inf)
        shares = torch.softmax(logits, dim=1)
        entropy = -torch.special.xlogy(shares, shares).sum(1, keepdim=True)
        wide = entropy > math.log(perplexity)
        least, most = torch.where(wide, middle, least), torch.where(wide, most, middle)
    return (shares + shares.t()) / (2 * n)


def gradient(shares: Tensor, points: Tensor) -> Tensor:
    """Return 4 sum_j (p_ij - q_ij) (y_i - y_j) / (1 + |y_i - y_j|^2), where q_ij is proportional to the last factor."""
    closeness = 1 / (1 + torch.cdist(points, points).square())
    closeness.fill_diagonal_(0.0)
    pulls = (shares - closeness / closeness.sum().clamp(min=1e-300)) * closeness
    return 4 * (pulls.sum(1, keepdim=True) * points - pulls @ points)


def principal_components(rows: Tensor, count: int = 2) -> Tensor:
    """Project rows onto their first principal components.

    The sign of a component is chosen so that its entry of the largest magnitude is positive; figures are reproducible.

    Args:
        rows: `(n, d)`.
        count: number of components.

    Returns:
        float64 `(n, count)`.
    """
    centred = rows.double() - rows.double().mean(0)
    axes = torch.linalg.svd(centred, full_matrices=False).Vh[:count]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    return centred @ (axes * largest.sign()).t()
