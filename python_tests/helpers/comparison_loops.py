"""The losses of the papers' comparisons in plain Python loops over floats: the reference for the loss modules.

Each function takes the scores (n, n) as nested lists (for distillation also those of the anchor branch) and a mask of
the pairs that are not negatives. It returns the loss of each row's anchor.

Inside: `ROWS`, `loop_losses`, `numerical_gradient`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Matrix = Sequence[Sequence[float]]


def _softmax(values: dict[int, float], scale: float) -> dict[int, float]:
    largest = max(values.values())
    exponentials = {index: math.exp(scale * (value - largest)) for index, value in values.items()}
    total = sum(exponentials.values())
    return {index: value / total for index, value in exponentials.items()}


def _candidates(row: Sequence[float], i: int, masked: Sequence[bool]) -> dict[int, float]:
    return {j: s for j, s in enumerate(row) if j == i or not masked[j]}


def cmpm(scores: Matrix, mask: Sequence[Sequence[bool]], *, scale: float = 1.0) -> list[float]:
    losses = []
    for i, row in enumerate(scores):
        p = _softmax(dict(enumerate(row)), scale)
        matching = {j for j in range(len(row)) if j == i or mask[i][j]}
        q = {j: 1 / len(matching) if j in matching else 0.0 for j in p}
        losses.append(sum(p[j] * math.log(p[j] / (q[j] + 1e-8)) for j in p))
    return losses


def polynomial(
    scores: Matrix,
    mask: Sequence[Sequence[bool]],
    *,
    margin: float = 0.2,
    positive: Sequence[float] = (0.5, -0.7, 0.2),
    negative: Sequence[float] = (0.03, -0.4, 0.9),
    largest_positive: float | None = None,
) -> list[float]:
    losses = []
    for i, row in enumerate(scores):
        informative = [s for j, s in enumerate(row) if j != i and not mask[i][j] and s + margin > row[i]]
        losses.append(0.0)
        if informative and (largest_positive is None or row[i] < largest_positive):
            own = sum(a * row[i] ** p for p, a in enumerate(positive))
            other = sum(b * max(informative) ** q for q, b in enumerate(negative))
            losses[-1] = max(own, 0.0) + max(other, 0.0)
    return losses


def dml(scores: Matrix, anchor: Matrix, mask: Sequence[Sequence[bool]], *, scale: float = 1.0) -> list[float]:
    losses = []
    for i in range(len(scores)):
        p = _softmax(_candidates(anchor[i], i, mask[i]), scale)
        q = _softmax(_candidates(scores[i], i, mask[i]), scale)
        losses.append(sum(p[j] * math.log(p[j] / q[j]) for j in p))
    return losses


def dino(
    scores: Matrix,
    anchor: Matrix,
    mask: Sequence[Sequence[bool]],
    *,
    scale: float = 10.0,
    anchor_scale: float = 25.0,
    inverse: bool = False,
    divergence: bool = False,
) -> list[float]:
    losses = []
    for i in range(len(scores)):
        p = _softmax(_candidates(anchor[i], i, mask[i]), anchor_scale)
        q = _softmax(_candidates(scores[i], i, mask[i]), scale)
        weights, logarithms = (q, p) if inverse else (p, q)
        crossed = -sum(weights[j] * math.log(logarithms[j]) for j in p)
        entropy = -sum(weights[j] * math.log(weights[j]) for j in p)
        losses.append(crossed - entropy if divergence else crossed)
    return losses


def rkd(
    scores: Matrix, anchor: Matrix, mask: Sequence[Sequence[bool]], *, normalize: bool = True, weight: float = 1.0
) -> list[float]:
    distances = []
    for matrix in (scores, anchor):
        rows = [{j: 1 - s for j, s in _candidates(row, i, mask[i]).items()} for i, row in enumerate(matrix)]
        every = [d for row in rows for d in row.values()]
        mean = sum(every) / len(every) if normalize else 1.0
        distances.append([{j: d / mean for j, d in row.items()} for row in rows])
    losses = []
    for target, other in zip(*distances, strict=True):
        gaps = [abs(target[j] - other[j]) for j in target]
        losses.append(weight * sum(x * x / 2 if x < 1 else x - 0.5 for x in gaps) / len(gaps))
    return losses


def soft_rank(
    scores: Matrix,
    anchor: Matrix,
    mask: Sequence[Sequence[bool]],
    *,
    length: int = 3,
    scale: float = 1.0,
    transfer: str = "soft",
) -> list[float]:
    losses = []
    for i in range(len(scores)):
        own, target = _candidates(anchor[i], i, mask[i]), _candidates(scores[i], i, mask[i])
        if transfer == "dbl":
            own, target = ({j: -3 * s * s * s for j, s in one.items()} for one in (own, target))
        listed = sorted(own, key=lambda j, own=own: (-own[j], j))
        listed = listed[1 : length + 1] if transfer == "dbl" else listed[:length]
        if transfer != "soft":
            losses.append(-math.log(_probability(target, listed, scale)))
            continue
        loss = 0.0
        for order in itertools.permutations(listed):
            p, q = _probability(own, order, scale), _probability(target, order, scale)
            loss += p * math.log(p / q)
        losses.append(loss)
    return losses


def _probability(scores: dict[int, float], order: Sequence[int], scale: float) -> float:
    probability = 1.0
    for place in range(len(order)):
        exponentials = [math.exp(scale * scores[j]) for j in order[place:]]
        probability *= exponentials[0] / sum(exponentials)
    return probability


# Keyed by module name; the first two losses depend only on scores.
ROWS: dict[str, Callable[..., list[float]]] = {
    "CMPMLoss": cmpm,
    "PolynomialLoss": polynomial,
    "DMLLoss": dml,
    "DINOLoss": dino,
    "RKDLoss": rkd,
    "SoftRankLoss": soft_rank,
}


def loop_losses(name: str, *matrices: np.ndarray, mask: np.ndarray | None = None, **options: Any) -> np.ndarray:
    """Compute the losses (2, n) of the row anchors and the column anchors in float64.

    Args:
        matrices: float64 (n, n): scores, and for distillation those of the anchor branch.
        mask: bool (n, n), pairs that are not negatives.
    """
    n = len(matrices[0])
    mask = np.zeros((n, n), dtype=bool) if mask is None else mask
    sides = [(*matrices, mask), tuple(matrix.T for matrix in (*matrices, mask))]
    return np.array([ROWS[name](*(matrix.tolist() for matrix in side), **options) for side in sides]).reshape(2, n)


def numerical_gradient(function: Callable[[np.ndarray], float], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Compute central differences of `function` at x entry by entry; the error is about 1e-9 for values of about 1."""
    gradient = np.zeros_like(x)
    for place in np.ndindex(*x.shape):
        values = []
        for sign in (1.0, -1.0):
            moved = x.copy()
            moved[place] += sign * step
            values.append(function(moved))
        gradient[place] = (values[0] - values[1]) / (2 * step)
    return gradient
