"""`AngularLoss`: bounds the angle at a negative in the triangle of an anchor, its positive and the negative."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from itm_fast.nn.similarity import inner_products

__all__ = ["AngularLoss"]


class AngularLoss(nn.Module):
    """Angular loss of pairs, as SAEM adds it to its triplet loss.

    With an anchor a, its positive p and the negatives n, all of p's modality, the loss of the anchor is
    `log(1 + exp(max_n f))`, `f = 4 tan^2(angle) (a + p) . n - 2 (1 + tan^2(angle)) a . p`. Images and captions are both
    anchors; the sum over both is returned. All other rows are negatives, also those of the same
    image.

    Args:
        angle: upper bound of the angle at the negative in degrees, above 0 and below 90. Official code of SAEM: 45.

    Raises:
        ValueError: `angle` is out of bounds.

    Source: Wang et al., Deep Metric Learning with Angular Loss, ICCV 2017, with the hardest negative in place of the
    sum, as in the official code of SAEM (Wu et al., ACM MM 2019).
    """

    def __init__(self, angle: float = 45.0) -> None:
        super().__init__()
        if not 0 < angle < 90:
            raise ValueError(f"angle: expected degrees above 0 and below 90, got {angle}")
        self.angle = float(angle)

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Return the loss, a scalar, of l2-normalised images (n, d) and captions (n, d); row i of both is a pair.

        A single pair has no negative, and the loss 0. It is float32, also under autocast, or float64 for float64.

        Raises:
            ValueError: a shape or dtype does not fit.
        """
        scores, of_images, of_captions = (
            inner_products(*sides) for sides in ((images, captions), (images, images), (captions, captions))
        )
        if len(images) != len(captions):
            raise ValueError(f"captions: expected {len(images)} rows, one for each image, got {len(captions)}")
        return self._of_anchors(scores, of_captions) + self._of_anchors(scores.t(), of_images)

    def _of_anchors(self, scores: Tensor, partners: Tensor) -> Tensor:
        """`scores` (n, n) of anchors with partners; `partners` (n, n), the cosines of partners with each other."""
        bound = math.tan(math.radians(self.angle)) ** 2
        each = 4 * bound * (scores + partners) - 2 * (1 + bound) * scores.diagonal()[:, None]
        own = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
        hardest = each.masked_fill(own, -torch.inf).max(dim=1).values if len(scores) > 1 else each[:0].sum(dim=1)
        return F.softplus(hardest).sum()

    def extra_repr(self) -> str:
        return f"angle={self.angle}"
