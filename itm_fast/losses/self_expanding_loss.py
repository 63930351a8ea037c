"""`SelfExpandingLoss`: the triplet loss of ESA over several augmented copies of each pair."""

from __future__ import annotations

import torch
from torch import Tensor

from itm_fast.losses.registry import register
from itm_fast.losses.score_loss import ScoreLoss
from itm_fast.ops.triplet_loss import check_scores, upcast
from itm_fast.reference import validation

__all__ = ["SelfExpandingLoss"]


@register("self_expanding", mining=("hardest", "all"))
class SelfExpandingLoss(ScoreLoss):
    """Triplet loss in which the positive of an anchor is the worst of the copies of its partner.

    Training repeats each pair of a batch `copies` times and augments each copy by itself. The scores are then (B, B)
    with B = `copies` n, the copies of a pair side by side. With g(i), the copies of i's pair, the loss of an anchor is
    `[margin + max_j s_ij - min_k s_ik]_+`, j outside g(i) and k in g(i).

    Args:
        margin: of the hinge, finite.
        copies: number of copies of each pair, at least 1; 1 is the triplet loss. Published: 2.
        mining: "hardest"; "all" adds the hinges of all negatives up.
        directions: "both", "rows" (image-to-text: an anchor per row) or "columns" (text-to-image).
        reduction: "sum" (published); "mean" divides the sum by B; "none" keeps the anchors apart.

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of bounds.

    Source: Zhu et al., ESA: External Space Attention Aggregation for Image-Text Retrieval, IEEE TCSVT 2023, and its
    official code.
    """

    def __init__(
        self,
        margin: float = 0.2,
        *,
        copies: int = 2,
        mining: str = "hardest",
        directions: str = "both",
        reduction: str = "sum",
    ) -> None:
        super().__init__(directions, reduction)
        validation.check_option("mining", mining, ("hardest", "all"))
        if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
            raise ValueError(f"copies: expected a whole number of at least 1, got {validation.describe(copies)}")
        self.margin, self.copies, self.mining = validation.finite_number("margin", margin), copies, mining

    def forward(self, scores: Tensor, *, positives: Tensor | None = None) -> Tensor:
        """Loss of `scores` (B, B).

        Args:
            scores: float32, float64, bfloat16 or float16; images in rows, the copies of a pair side by side.
            positives: bool (B, B), True for further pairs that are not negatives, such as captions of the same image.

        Returns:
            Scalar, or with reduction "none" (2, B) with image-to-text in row 0 (one direction alone: (B,)). float32, or
            float64 for float64 scores. An anchor without a negative has the loss 0.

        Raises:
            TypeError: an argument is not a tensor of a supported dtype.
            ValueError: `scores` is not square, B is not a multiple of `copies`, or `positives` does not fit.
        """
        check_scores(scores, positives, square=True)
        if len(scores) % self.copies:
            raise ValueError(f"scores: expected a multiple of copies {self.copies} rows, got {len(scores)}")
        pair = torch.arange(len(scores), device=scores.device) // self.copies
        own = pair[:, None] == pair
        idle = own if positives is None else own | positives
        values = upcast(scores)
        return self._reduced_from(
            lambda: self._of_anchors(values, own, idle), lambda: self._of_anchors(values.t(), own, idle.t())
        )

    def _of_anchors(self, scores: Tensor, own: Tensor, idle: Tensor) -> Tensor:
        if not len(scores):
            return scores.sum(dim=1)
        worst = scores.masked_fill(~own, torch.inf).min(dim=1, keepdim=True).values
        hinges = torch.relu(self.margin + scores - worst).masked_fill(idle, 0.0)
        return hinges.sum(dim=1) if self.mining == "all" else hinges.max(dim=1).values
