"""Boosting losses in plain Python loops over floats, from the equations of the paper: the reference for the tests.

Inside: `upper`, `lower`, `loop_boosting`, `STRATEGIES`, `MINING`, `random_pair`, `with_gradient`.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from torch import Tensor

from python_tests.helpers.triplets import loop_hardest

STRATEGIES = ("relative", "absolute", "both")
MINING = ("all", "hardest")


def upper(r: float, m: float, e: float) -> float:
    """Compute the margin of Eq 17 and of the first line of Eq 19."""
    return _soft(2 / m * (r - e), m) if m else 0.0


def lower(r: float, m: float, e: float) -> float:
    """Compute the margin of the second line of Eq 19, with the sign that makes it rise from 0."""
    return _soft(-2 / m * (r + e), m) if m else 0.0


def _soft(exponent: float, m: float) -> float:
    if math.isnan(exponent):
        return math.nan
    return 2 * m / (1 + (math.exp(exponent) if exponent < 700 else math.inf)) - m


@attrs.frozen
class Loops:
    losses: Tensor  # (directions, B) float64
    gradient: Tensor  # (B, B) float64, gradient of the weighted sum of the losses
    # Distance to another selection: the minimum of the smallest non-zero hinge and the smallest difference between the
    # hardest negative's hinge and the hinge of a pair with other scores.
    doubt: float


def loop_boosting(
    scores: Tensor,
    anchor_scores: Tensor,
    *,
    strategy: str = "absolute",
    mining: str = "hardest",
    margin: float = 0.2,
    alpha: float = 0.5,
    soft: bool = False,
    positives: Tensor | None = None,
    directions: str = "both",
    weights: Tensor | None = None,
) -> Loops:
    """Compute the loss of every anchor, and the gradient of their weighted sum.

    `weights`: (directions, B); ones by default.
    """
    s, a = scores.double().tolist(), anchor_scores.double().tolist()
    n = len(s)
    masked = positives.tolist() if positives is not None else [[False] * n for _ in range(n)]
    gradient = torch.zeros(n, n, dtype=torch.float64)
    losses: list[list[float]] = []
    doubts = [math.inf]
    sides = [side for side in ("rows", "columns") if directions in ("both", side)]
    parts = ["relative", "absolute"] if strategy == "both" else [strategy]
    for position, side in enumerate(sides):
        losses.append([])
        for anchor in range(n):
            places = {
                other: (anchor, other) if side == "rows" else (other, anchor) for other in range(n) if other != anchor
            }
            pairs = {o: (s[i][j], a[i][j]) for o, (i, j) in places.items() if not masked[i][j]}
            own = s[anchor][anchor], a[anchor][anchor]
            total = 0.0
            for part in parts:
                compute = _relative if part == "relative" else _absolute
                loss, slopes, own_slope, doubt = compute(own, pairs, mining, margin, alpha, soft)
                total += loss / len(parts)
                doubts.append(doubt)
                weight = (float(weights[position, anchor]) if weights is not None else 1.0) / len(parts)
                for other, slope in slopes.items():
                    gradient[places[other]] += weight * slope
                if own_slope:
                    gradient[anchor, anchor] += weight * own_slope
            losses[-1].append(total)
    return Loops(torch.tensor(losses, dtype=torch.float64).reshape(len(sides), n), gradient, min(doubts))


Pair = tuple[float, float]
Anchor = tuple[float, dict[int, float], float, float]


def _relative(own: Pair, pairs: dict[int, Pair], mining: str, margin: float, _alpha: float, soft: bool) -> Anchor:
    """Compute Eq 7, 8 and 18 in one direction."""
    margins = {o: upper(own[1] - a, margin, 2.0) if soft else margin for o, (_, a) in pairs.items()}
    inside = {o: margins[o] + (own[1] - a) - (own[0] - s) for o, (s, a) in pairs.items()}
    if not pairs:
        return (math.nan if math.isnan(own[0] - own[1]) else 0.0), {}, 0.0, math.inf
    loss, slopes, doubt = _mined(inside, margins, pairs, mining)
    return loss, slopes, -sum(slopes.values()), doubt


def _absolute(own: Pair, pairs: dict[int, Pair], mining: str, margin: float, alpha: float, soft: bool) -> Anchor:
    """Compute Eq 9, 10 and 20 in one direction."""
    m1, m2 = alpha * margin, (1 - alpha) * margin
    margins = {o: lower(a, m2, 1.0) if soft else m2 for o, (_, a) in pairs.items()}
    inside = {o: margins[o] + s - a for o, (s, a) in pairs.items()}
    own_term = (upper(own[1], m1, 1.0) if soft else m1) + own[1] - own[0]
    count = len(pairs) if mining == "all" else 1
    loss, slopes, doubt = _mined(inside, margins, pairs, mining)
    loss += count * _positive_part(own_term) if count else (math.nan if math.isnan(own_term) else 0.0)
    own_slope = -float(count) if _positive_part(own_term) != 0 else 0.0
    return loss, slopes, own_slope, min(doubt, abs(own_term) or math.inf)


def _positive_part(x: float) -> float:
    return 0.0 if x <= 0 else x


def _mined(
    inside: dict[int, float], margins: dict[int, float], pairs: dict[int, Pair], mining: str
) -> tuple[float, dict[int, float], float]:
    """Return the loss of the mined hinges, their slopes, and the distance to another selection."""
    doubts = [abs(x) for x in inside.values() if x != 0]
    chosen = list(inside)
    if mining == "hardest" and inside:
        # The hardest negative has the largest margin + s - a. s_pos and a_pos are the same for all and may be infinite.
        keys = {o: margins[o] + (s - a) for o, (s, a) in pairs.items()}
        chosen = [loop_hardest(keys)[1]]
        doubts += [abs(keys[o] - keys[chosen[0]]) for o in keys if pairs[o] != pairs[chosen[0]]]
    slopes = {o: 1.0 for o in chosen if _positive_part(inside[o]) != 0}
    loss = sum((_positive_part(inside[o]) for o in chosen), 0.0)
    return loss, slopes, min([doubt for doubt in doubts if not math.isnan(doubt)], default=math.inf)


def random_pair(n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw scores (n, n) of a target branch and of an anchor branch, within [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.tanh(0.5 * torch.randn(2, n, n, generator=generator, dtype=torch.float64))
    return both[0].to(dtype), both[1].to(dtype)


def with_gradient(
    function: Any, scores: Tensor, anchor_scores: Tensor, weights: Tensor | None = None, **options: Any
) -> list[Tensor]:
    """Return the losses of the anchors and the gradient of the scores."""
    leaf = scores.detach().clone().requires_grad_()
    losses = function(leaf, anchor_scores, reduction="none", **options)
    incoming = torch.ones_like(losses) if weights is None else weights.to(losses.dtype).reshape(losses.shape)
    return [losses.detach(), *torch.autograd.grad(losses, leaf, incoming)]
