"""`ClippedSCTLoss` against its formula anchor by anchor, and its gradient where plain SCT has none that leads away."""

from __future__ import annotations

import pytest
import torch

from itm_fast.losses import ClippedSCTLoss


def by_hand(scores: torch.Tensor, margin: float, free: set[tuple[int, int]]) -> list[list[float]]:
    size, sides = len(scores), []
    for matrix, turned in ((scores.tolist(), False), (scores.t().tolist(), True)):
        losses = []
        for i in range(size):
            others = [j for j in range(size) if j != i and ((j, i) if turned else (i, j)) not in free]
            hardest, own = max((matrix[i][j] for j in others), default=None), matrix[i][i]
            if hardest is None:
                losses.append(0.0)
            elif hardest >= own:
                losses.append(max(hardest, 0.0))
            else:
                losses.append(max(margin + hardest - own, 0.0))
        sides.append(losses)
    return sides


def test_the_formula_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(6, 6, generator=generator, dtype=torch.float64) * 2 - 1
    scores[2] = -scores[2].abs()
    positives = torch.zeros(6, 6, dtype=torch.bool)
    positives[0, 1] = positives[3, 4] = True
    expected = torch.tensor(by_hand(scores, 0.2, {(0, 1), (3, 4)}), dtype=torch.float64)
    assert expected.count_nonzero() not in (0, expected.numel())
    torch.testing.assert_close(ClippedSCTLoss(reduction="none")(scores, positives=positives), expected)
    torch.testing.assert_close(ClippedSCTLoss()(scores, positives=positives), expected.sum())
    torch.testing.assert_close(ClippedSCTLoss(reduction="mean")(scores, positives=positives), expected.sum() / 6)
    for side, name in zip(expected, ("rows", "columns"), strict=True):
        torch.testing.assert_close(ClippedSCTLoss(directions=name)(scores, positives=positives), side.sum())
    leaf = scores.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: ClippedSCTLoss()(s, positives=positives), leaf)


def test_negatives_below_zero_are_left_alone() -> None:
    scores = torch.full((3, 3), -0.5, requires_grad=True)
    ClippedSCTLoss()(scores).backward()
    assert scores.grad is not None
    assert not scores.grad.any()


def test_a_margin_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="margin"):
        ClippedSCTLoss(float("nan"))
