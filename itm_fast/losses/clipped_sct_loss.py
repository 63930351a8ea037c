"""`ClippedSCTLoss`: the selectively contrastive triplet loss without its absorbing minimum."""

from __future__ import annotations

import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.losses.registry import register
from itm_fast.losses.score_loss import ScoreLoss
from itm_fast.reference import validation

__all__ = ["ClippedSCTLoss"]


@register("clipped_sct", mining=("hardest",))
class ClippedSCTLoss(ScoreLoss):
    """SCT in which a hardest negative above its positive has the loss `[s_hardest]_+` instead of `s_hardest`.

    `triplet_loss(mining="sct")` is smallest where all scores, also those of positives, are -1: from there no gradient
    leads away. With the clip, a negative below 0 is not pushed further.

    Args:
        margin: of the hinge `[margin + s_hardest - s_pos]_+` where the hardest negative is below the positive, finite.
        directions: "both", "rows" (image-to-text: an anchor per row) or "columns" (text-to-image).
        reduction: "sum"; "mean" divides the sum by B; "none" keeps the anchors apart.

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of bounds.

    Source: Xuan et al., Hard Negative Examples are Hard, but Useful, ECCV 2020; Li et al., Selectively Hard Negative
    Mining, 2023, Eq 15. The clip is ours.
    """

    def __init__(self, margin: float = 0.2, *, directions: str = "both", reduction: str = "sum") -> None:
        super().__init__(directions, reduction)
        self.margin = validation.finite_number("margin", margin)

    def forward(self, scores: Tensor, *, positives: Tensor | None = None) -> Tensor:
        """Return the loss of `scores` (B, B), images in rows; arguments as in `itm_fast.functional.triplet_loss`."""
        found = F_itm.triplet_loss(scores, margin=self.margin, mining="sct", reduction="none", positives=positives)
        # The hinge is not negative, so that the clip applies to both cases.
        rows, columns = torch.relu(found)
        return self._reduced_from(lambda: rows, lambda: columns)
