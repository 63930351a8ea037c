"""`BCELoss`: binary cross-entropy of pairs that match and pairs that do not, for scores in (0, 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from itm_fast.losses.registry import register
from itm_fast.losses.score_loss import ScoreLoss, matching
from itm_fast.ops.triplet_loss import check_scores, upcast
from itm_fast.reference import validation

__all__ = ["BCELoss"]

MINING = ("hardest", "all")


@register("bce", mining=MINING)
class BCELoss(ScoreLoss):
    """Binary cross-entropy of an anchor's positive and its hardest negative, for models that score in (0, 1).

    The loss of an anchor is `-log s_pos - log(1 - s_neg)` with its hardest negative, or with "all" the sum of
    `-log(1 - s_neg)` over its negatives. Scores are first clamped to [epsilon, 1 - epsilon]: a score outside has no
    gradient. An anchor without a negative has only its positive.

    Args:
        mining: the negatives of an anchor: "hardest" (published) or "all".
        clamp: epsilon, at least 1e-7, so that 1 - epsilon is below 1 in float32, and below 0.5. Published: 1e-6.
        directions: "both", "rows" (image-to-text: an anchor per row) or "columns" (text-to-image).
        reduction: "sum" (published); "mean" divides the sum by B; "none" keeps the anchors apart.

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of bounds.

    Source: Wang et al., "CAMP: Cross-Modal Adaptive Message Passing for Text-Image Retrieval" (ICCV 2019), with the
    clamp of its official code.
    """

    def __init__(
        self,
        mining: str = "hardest",
        *,
        clamp: float = 1e-6,
        directions: str = "both",
        reduction: str = "sum",
    ) -> None:
        super().__init__(directions, reduction)
        validation.check_option("mining", mining, MINING)
        self.mining, self.clamp = mining, validation.finite_number("clamp", clamp, minimum=1e-7)
        if self.clamp >= 0.5:
            raise ValueError(f"clamp: expected a number below 0.5, got {self.clamp}")

    def forward(self, scores: Tensor, *, positives: Tensor | None = None) -> Tensor:
        """Compute the loss of `scores` (B, B).

        Args:
            scores: float32, float64, bfloat16 or float16, in (0, 1), matching pairs on the diagonal.
            positives: bool (B, B), True for further pairs that are not negatives, such as captions of the same image.

        Returns:
            Scalar, or with reduction "none" (2, B) with image-to-text in row 0 (one direction alone: (B,)). float32, or
            float64 for float64 scores.

        Raises:
            TypeError: an argument is not a tensor of a supported dtype.
            ValueError: a shape or device does not fit.
        """
        check_scores(scores, positives, square=True)
        clamped = upcast(scores).clamp(self.clamp, 1 - self.clamp)
        of_positives = -clamped.diagonal().log()
        negatives = -torch.log1p(-clamped)
        left_out = matching(scores)
        if positives is not None:
            left_out = left_out | positives
        # The cross-entropy of a negative rises with its score, so that the hardest one has the greatest.
        negatives = negatives.masked_fill(left_out, 0.0)
        return self._reduced(lambda rows: of_positives + self._of_rows(rows), negatives)

    def _of_rows(self, negatives: Tensor) -> Tensor:
        if self.mining == "all" or negatives.shape[1] == 0:
            return negatives.sum(dim=1)
        # max, not amax, which would share the gradient among equal scores.
        return negatives.max(dim=1).values
