"""The baseline losses of the DBL paper as its public code computes them over whole matrices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from itm_fast import losses

SIZE, SCALE = 9, 10.0


def matrices(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    target, anchor = np.tanh(random.standard_normal((2, SIZE, SIZE)))
    return target, anchor


def log_softmax(scores: np.ndarray) -> np.ndarray:
    scaled = SCALE * scores
    return scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """Return KL(p || q) as a mean over rows; p and q are log probabilities."""
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def both(loss: Callable[..., float], *scores: np.ndarray) -> float:
    """Return the sum of a loss over both directions."""
    return loss(*scores) + loss(*(one.T for one in scores))


def cmpm(scores: np.ndarray) -> float:
    p = np.exp(log_softmax(scores))
    return float((p * np.log(1e-8 + p / (np.eye(SIZE) + 1e-8))).sum(axis=1).mean())


def dark_rank(target: np.ndarray, anchor: np.ndarray) -> float:
    target, anchor = -3 * target**3, -3 * anchor**3
    total = 0.0
    for own, theirs in zip(target, anchor, strict=True):
        powers = [own[j] for j in np.argsort(-theirs, kind="stable")[1:5]]
        total -= sum(power - np.log(np.exp(powers[place:]).sum()) for place, power in enumerate(powers))
    return total / SIZE


def test_rkd() -> None:
    """The Huber loss of the unnormalised scores, times 10."""
    target, anchor = matrices()
    gaps = np.abs(target - anchor)
    assert gaps.max() > 1
    expected = 10 * np.where(gaps < 1, gaps**2 / 2, gaps - 0.5).mean()
    loss = losses.RKDLoss(normalize=False, weight=10.0, directions="rows", reduction="mean")
    assert loss(*map(torch.from_numpy, (target, anchor))).item() == pytest.approx(expected, rel=1e-12)


def test_dml_and_dino() -> None:
    target, anchor = map(torch.from_numpy, matrices())
    expected = both(lambda s, a: divergence(log_softmax(a), log_softmax(s)), *matrices())
    assert losses.DMLLoss(scale=SCALE, reduction="mean")(target, anchor).item() == pytest.approx(expected, rel=1e-12)
    dino = {"scale": SCALE, "anchor_scale": SCALE, "reduction": "mean"}
    expected = both(lambda s, a: -float((np.exp(log_softmax(a)) * log_softmax(s)).sum(axis=1).mean()), *matrices())
    assert losses.DINOLoss(**dino)(target, anchor).item() == pytest.approx(expected, rel=1e-12)
    # DINO*: the divergence of the target from the anchor; the paper states the cross-entropy.
    expected = both(lambda s, a: divergence(log_softmax(s), log_softmax(a)), *matrices())
    inverse = losses.DINOLoss(inverse=True, divergence=True, **dino)
    assert inverse(target, anchor).item() == pytest.approx(expected, rel=1e-12)
    assert losses.DINOLoss(inverse=True, **dino)(target, anchor).item() > 1.05 * expected


def test_dark_rank() -> None:
    """The list holds the four scores above the lowest one, in ascending order."""
    target, anchor = map(torch.from_numpy, matrices())
    loss = losses.SoftRankLoss(length=4, transfer="dbl", reduction="mean")
    assert loss(target, anchor).item() == pytest.approx(both(dark_rank, *matrices()), rel=1e-12)
    rising = torch.linspace(-0.9, 0.9, 9, dtype=torch.float64).expand(9, 9)
    falling = losses.SoftRankLoss(length=4, transfer="dbl", directions="rows")(rising, -rising)
    assert losses.SoftRankLoss(length=4, transfer="dbl", directions="rows")(rising, rising) < falling


def test_cmpm() -> None:
    loss = losses.CMPMLoss(scale=SCALE, reduction="mean")
    scores = matrices()[0]
    # The public code also adds 1e-8 to the ratio.
    assert loss(torch.from_numpy(scores)).item() == pytest.approx(both(cmpm, scores), rel=1e-6)


def test_the_polynomial_loss() -> None:
    """Anchors whose positive scores almost 1 have no loss. The mean includes these anchors."""
    scores = matrices()[0]
    scores[2, 2], scores[2, 3], scores[5, 5] = 1.0, 0.9, 1 - 2e-5
    total = 0.0
    for matrix in (scores, scores.T):
        for i, row in enumerate(matrix):
            informative = [s for j, s in enumerate(row) if j != i and s + 0.2 > row[i]]
            if row[i] < 1 - 1e-5 and informative:
                hardest = max(informative)
                total += max(0.2 * row[i] ** 2 - 0.7 * row[i] + 0.5, 0)
                total += max(0.9 * hardest**2 - 0.4 * hardest + 0.03, 0)
    inputs = torch.from_numpy(scores)
    loss = losses.PolynomialLoss(largest_positive=1 - 1e-5, reduction="mean")
    assert loss(inputs).item() == pytest.approx(total / SIZE, rel=1e-12)
    assert losses.PolynomialLoss(reduction="mean")(inputs).item() > total / SIZE + 0.01


def test_hard_transfer_of_an_example_by_hand() -> None:
    """The hard transfer of DarkRank: only the descending order of the anchor branch is the correct permutation."""
    target = torch.tensor([[0.5, 0.0, -0.5]] * 3, dtype=torch.float64)
    anchor = torch.tensor([[0.1, 0.9, 0.2]] * 3, dtype=torch.float64)
    loss = losses.SoftRankLoss(length=2, transfer="hard", directions="rows", reduction="none", scale=2.0)
    # The list holds the scores 0.0 and -0.5, scaled by 2.
    assert loss(target, anchor).tolist() == pytest.approx([np.log(1 + np.exp(-1.0))] * 3, rel=1e-12)
