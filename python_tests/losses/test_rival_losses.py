"""The losses of AOQ and NCR, values and gradients, against loops over one pair at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from itm_fast.losses import InfoNCELoss, MatchingBCELoss
from itm_fast.losses.quintuplet_loss import QuintupletLoss
from itm_fast.losses.rectified_loss import (
    SOFT_MARGINS,
    pair_losses,
    predicted_labels,
    rectified_losses,
    soft_margins,
)

B = 7


def random_scores(seed: int = 0) -> Tensor:
    return torch.randn(B, B, generator=torch.Generator().manual_seed(seed)).double().mul_(0.2).requires_grad_()


def images() -> Tensor:
    """Pairs 1 and 4 show the same image."""
    return torch.tensor([0, 1, 2, 3, 1, 5, 6])


def positives() -> Tensor:
    return images()[:, None] == images()


def negatives_of(scores: Tensor, i: int, column: bool) -> list[Tensor]:
    return [scores[j, i] if column else scores[i, j] for j in range(B) if images()[j] != images()[i]]


def assert_same(found: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    assert float(expected.detach().sum()) > 0
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_quintuplets(reduction: str) -> None:
    """Some online terms are idle, and so are some offline ones."""
    scores = random_scores()
    offline = torch.randn(4, B, generator=torch.Generator().manual_seed(1)).double().mul_(0.3).requires_grad_()
    total, idle = torch.zeros(()).double(), 0
    for i in range(B):
        own = scores[i, i]
        for column, off in ((False, offline[0, i]), (True, offline[1, i])):
            online = max(negatives_of(scores, i, column))
            hinge = 0.1 + online - own
            idle += int(hinge <= 0)
            if hinge > 0:
                total = total + hinge * (1.4 - (off - online) / 0.25)
        for kind in range(4):
            hinge = 0.05 + offline[kind, i] - own
            idle += int(hinge <= 0)
            total = total + (hinge if hinge > 0 else 0 * hinge)
    assert 0 < idle < 6 * B
    loss = QuintupletLoss(0.1, offline_margin=0.05, alpha=0.25, beta=1.4, reduction=reduction)
    expected = total / B if reduction == "mean" else total
    assert_same(loss(scores, offline, positives=positives()), expected, (scores, offline))


def test_quintuplets_without_a_negative() -> None:
    scores, offline = torch.zeros(1, 1, requires_grad=True), torch.full((4, 1), 0.5, requires_grad=True)
    value = QuintupletLoss()(scores, offline)
    value.backward()
    assert (value.item(), scores.grad.item()) == (2.0, -4.0)
    with pytest.raises(ValueError, match=r"^offline: expected shape \(4, 1\), got \(3, 1\)$"):
        QuintupletLoss()(scores, offline[:3])
    with pytest.raises(ValueError, match=r"^alpha: "):
        QuintupletLoss(alpha=0.0)


def losses_of_pairs(scores: Tensor, margin: float) -> Tensor:
    found = []
    for i in range(B):
        hinges = [margin + s - scores[i, i] for column in (False, True) for s in negatives_of(scores, i, column)]
        found.append(sum(h if h > 0 else 0 * h for h in hinges) / B)
    return torch.stack(found)


def test_losses_and_predicted_labels_of_pairs() -> None:
    scores = random_scores()
    expected = losses_of_pairs(scores, 0.2)
    assert_same(pair_losses(scores, 0.2, positives=positives()), expected, (scores,))
    raw = [min(max(0.2 - float(one) / 2, 0.0), 0.2) for one in expected.detach()]
    assert len(set(raw)) > 3
    labels = [min(one / max(raw), 1.0) for one in raw]
    found = predicted_labels(scores.detach(), 0.2, positives=positives())
    torch.testing.assert_close(found, torch.tensor(labels, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    # The scale is the mean of the greatest tenth and one more: here two.
    many = torch.diag(torch.linspace(-0.3, 0.1, 12)).double()
    each = (0.2 - pair_losses(many, 0.2) / 2).clamp(0, 0.2)
    scale = each.sort().values[-2:].mean()
    torch.testing.assert_close(predicted_labels(many, 0.2), (each / scale).clamp(max=1.0))
    assert predicted_labels(-10 * torch.eye(4), 0.2).tolist() == [0.0] * 4


def test_hardest_negatives_with_a_margin_of_each_pair() -> None:
    scores, margins = random_scores(), torch.linspace(0.0, 0.3, B).double()
    expected = []
    for i in range(B):
        hinges = [margins[i] + max(negatives_of(scores, i, column)) - scores[i, i] for column in (False, True)]
        expected.append(sum(h if h > 0 else 0 * h for h in hinges))
    assert_same(rectified_losses(scores, margins, positives=positives()), torch.stack(expected), (scores,))
    alone = torch.zeros(2, 2, requires_grad=True)
    value = rectified_losses(alone, torch.ones(2), positives=torch.ones(2, 2, dtype=torch.bool))
    value.sum().backward()
    assert (value.tolist(), alone.grad.abs().sum().item()) == ([0.0, 0.0], 0.0)


def test_soft_margins_rise_from_zero_to_the_margin() -> None:
    labels = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    middles = {
        "exponential": (10**0.3 - 1) / 9, "linear": 0.3, "sine": math.sin(math.pi * 0.3 - math.pi / 2) / 2 + 0.5
    }  # fmt: skip
    assert set(middles) == set(SOFT_MARGINS)
    for form, middle in middles.items():
        assert soft_margins(labels, 0.2, form).tolist() == pytest.approx([0.0, 0.2 * middle, 0.2], abs=1e-12)
    with pytest.raises(ValueError, match=r"^form: expected exponential, linear, sine, got 'cubic'$"):
        soft_margins(labels, 0.2, "cubic")


def test_quintuplets_of_a_wrong_kind_are_named() -> None:
    loss, scores = QuintupletLoss(), torch.zeros(2, 2)
    for offline in ([[0.0] * 2] * 4, torch.zeros(4, 2, dtype=torch.int64)):
        with pytest.raises(TypeError, match=r"^offline: expected a tensor of"):
            loss(scores, offline)
    with pytest.raises(TypeError, match=r"^scores: "):
        loss(None, torch.zeros(4, 2))
    for make in (InfoNCELoss, MatchingBCELoss):
        with pytest.raises(TypeError, match=r"^halve: "):
            make(halve="no")
