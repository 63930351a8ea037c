"""`PolynomialLoss`: the self-similarity polynomial loss (SSP), also called maximum polynomial loss (MPL)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.losses.registry import register
from itm_fast.losses.score_loss import ScoreLoss
from itm_fast.ops.triplet_loss import upcast
from itm_fast.reference import validation

__all__ = ["PolynomialLoss"]


@register("polynomial", mining=("hardest",))
class PolynomialLoss(ScoreLoss):
    """Self-similarity polynomial loss: polynomials weigh an anchor's positive and its hardest negative.

    Where the hardest negative is informative, `s_neg + margin > s_pos`, the loss of an anchor is
    `[sum_p a_p s_pos^p]_+ + [sum_q b_q s_neg^q]_+`; elsewhere, and without a negative, it is 0.

    Args:
        margin: of the choice of informative negatives, finite.
        positive: coefficients a_0, a_1, … of the positive's polynomial. Published: (0.5, -0.7, 0.2), which falls to 0
            at a score of 1.
        negative: coefficients b_0, b_1, … of the negative's polynomial. Published: (0.03, -0.4, 0.9).
        largest_positive: an anchor whose positive scores this much or more has no loss. Public code: 1 - 1e-5. None:
            all have one, as the formula.
        directions: "both", "rows" (image-to-text: an anchor per row) or "columns" (text-to-image).
        reduction: "sum"; "mean" divides the sum by B (published); "none" keeps the anchors apart.

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of bounds.

    Source: Wei et al., Universal Weighting Metric Learning for Cross-Modal Matching, CVPR 2020, with the hardest
    negative and the numbers of its public code. "SSP [36]" in SelHN and RVSE++ (Table 4), "MPL [18]" in Deep Boosting
    Learning (Table III).
    """

    def __init__(
        self,
        margin: float = 0.2,
        *,
        positive: Sequence[float] = (0.5, -0.7, 0.2),
        negative: Sequence[float] = (0.03, -0.4, 0.9),
        largest_positive: float | None = None,
        directions: str = "both",
        reduction: str = "sum",
    ) -> None:
        super().__init__(directions, reduction)
        self.margin = validation.finite_number("margin", margin)
        self.positive = _coefficients("positive", positive)
        self.negative = _coefficients("negative", negative)
        self.largest_positive = (
            None if largest_positive is None else validation.finite_number("largest_positive", largest_positive)
        )

    def forward(self, scores: Tensor, *, positives: Tensor | None = None) -> Tensor:
        """Loss of `scores` (B, B).

        Args:
            scores: float32, float64, bfloat16 or float16, positives on the diagonal.
            positives: bool (B, B), True for further pairs that are not negatives, such as captions of the same image.

        Returns:
            Scalar, or with reduction "none" (2, B) with image-to-text in row 0 (one direction alone: (B,)). float32, or
            float64 for float64 scores.

        Raises:
            TypeError: an argument is not a tensor of a supported dtype.
            ValueError: `scores` is not square, or `positives` does not fit it.
        """
        (rows, _), (columns, _) = F_itm.hardest_negatives(scores, positives)
        own = upcast(scores).diagonal()
        return self._reduced_from(lambda: self._of_anchors(own, rows), lambda: self._of_anchors(own, columns))

    def _of_anchors(self, positive: Tensor, hardest: Tensor) -> Tensor:
        # Asked this way round, a NaN stays visible.
        idle = hardest + self.margin <= positive
        if self.largest_positive is not None:
            idle = idle | (positive >= self.largest_positive)
        # The polynomial of a negative that counts nothing must not be infinite: its derivative would become NaN.
        hardest = hardest.masked_fill(idle, 0.0)
        losses = torch.relu(_polynomial(self.positive, positive)) + torch.relu(_polynomial(self.negative, hardest))
        return torch.where(idle, 0.0, losses)


def _coefficients(name: str, values: object) -> tuple[float, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise TypeError(f"{name}: expected the coefficients of a polynomial, got {validation.describe(values)}")
    return tuple(validation.finite_number(f"{name}[{power}]", value) for power, value in enumerate(values))


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    value = torch.zeros_like(x)
    for coefficient in reversed(coefficients):
        value = value * x + coefficient
    return value
