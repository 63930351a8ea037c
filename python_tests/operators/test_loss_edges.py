"""Edge cases of the triplet and boosting losses, and SelHN as in the paper and as in its public code."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import reference
from python_tests.helpers.boosting import MINING as BOOSTING_MINING
from python_tests.helpers.boosting import STRATEGIES, random_pair
from python_tests.helpers.triplet_cases import IMPLEMENTATIONS, MINING, both_implementations

# Each form of both losses: function name, number of matrices, options.
FORMS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    *(("triplet_loss", 1, {"mining": mining, "epsilon": 0.2}) for mining in MINING),
    *(
        ("boosting_loss", 2, {"strategy": strategy, "mining": mining, "soft": soft})
        for strategy, mining, soft in product(STRATEGIES, BOOSTING_MINING, (False, True))
    ),
)
every_form = pytest.mark.parametrize(("name", "count", "options"), FORMS)


def value_and_gradient(function: Any, matrices: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    leaf = matrices[0].clone().requires_grad_()
    value = function(leaf, *matrices[1:], **options)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@both_implementations
@every_form
def test_a_mask_without_its_diagonal_is_one_with_it(
    implementation: str, name: str, count: int, options: dict[str, Any]
) -> None:
    function = getattr(F_itm if implementation == "native" else reference, name)
    matrices = list(random_pair(9, seed=1))[:count]
    mask, diagonal = random_pair(9, seed=2)[0] > 0.3, torch.eye(9, dtype=torch.bool)
    for without, whole in ((mask & ~diagonal, mask | diagonal), (~diagonal & False, None)):
        found = value_and_gradient(function, matrices, positives=without, **options)
        expected = value_and_gradient(function, matrices, positives=whole, **options)
        assert all(map(torch.equal, found, expected))
        assert float(found[0]) > 0


@both_implementations
@every_form
def test_without_negatives_only_the_positive_of_absolute_costs(
    implementation: str, name: str, count: int, options: dict[str, Any]
) -> None:
    """A batch of one pair, and batches in which all pairs are positive, with the diagonal or without it."""
    function = getattr(F_itm if implementation == "native" else reference, name)
    everything = torch.ones(5, 5, dtype=torch.bool)
    for positives in (None, everything, everything & ~torch.eye(5, dtype=torch.bool)):
        n = 1 if positives is None else 5
        matrices = list(random_pair(n, seed=4))[:count]
        value, gradient = value_and_gradient(function, matrices, positives=positives, **options)
        if options.get("strategy", "relative") == "relative" or options["mining"] == "all":
            assert value.item() == 0
            assert not bool(gradient.any())
        else:
            assert math.isfinite(value.item())
            # The term of the positive in both directions; the mean of two strategies halves it.
            slope = -1.0 if options["strategy"] == "both" else -2.0
            expected = torch.where(gradient.diagonal() != 0, slope, 0.0).double()
            assert torch.equal(gradient, torch.diag(expected))


def test_anchor_scores_that_do_not_fit_are_named() -> None:
    scores, anchor = random_pair(4)
    for wrong, kind, message in (
        (anchor[:3, :3], ValueError, r"^anchor_scores: expected shape \(4, 4\) like scores, got \(3, 3\)$"),
        (anchor.t()[:, :3], ValueError, r"^anchor_scores: expected shape \(4, 4\) like scores, got \(4, 3\)$"),
        (anchor[0], ValueError, r"^anchor_scores: expected shape \(n, m\), got a float64 tensor of shape \(4,\)$"),
        (anchor.to("meta"), ValueError, r"^anchor_scores: expected it on cpu like scores, got meta$"),
        (anchor.float(), TypeError, r"^anchor_scores: expected a tensor of dtype float64, got a float32 tensor"),
    ):
        with pytest.raises(kind, match=message):
            F_itm.boosting_loss(scores, wrong)


@both_implementations
def test_selhn_as_its_public_code_has_it(implementation: str) -> None:
    """The code divides by B - 1, takes the batch mean, and halves the sum of both directions.

    The paper does none of these.
    """
    function = IMPLEMENTATIONS[implementation]
    size, margin, epsilon = 12, 0.2, 0.1
    scores = random_pair(size, seed=5)[0]
    sides, taken = [], 0
    for matrix in (scores, scores.t()):
        losses = {"code": 0.0, "paper": 0.0}
        for i in range(size):
            negatives = [float(matrix[i, j]) for j in range(size) if j != i]
            hinges = [max(margin + negative - float(matrix[i, i]), 0.0) for negative in negatives]
            far = abs(max(negatives) - float(matrix[i, i])) > epsilon
            taken += far
            losses["code"] += max(hinges) if far else sum(hinges) / (size - 1)
            losses["paper"] += max(hinges) if far else sum(hinges) / size
        sides.append(losses)
    assert 0 < taken < 2 * size
    options = {"mining": "selective", "margin": margin, "epsilon": epsilon}
    code = function(scores, selective_divisor="negatives", halve=True, reduction="mean", **options)
    assert code.item() == pytest.approx(sum(losses["code"] for losses in sides) / size / 2, rel=1e-12)
    assert function(scores, **options).item() == pytest.approx(sum(losses["paper"] for losses in sides), rel=1e-12)
