"""`CMPMLoss`: cross-modal projection matching."""

from __future__ import annotations

import torch
from torch import Tensor

from itm_fast.losses.registry import register
from itm_fast.losses.score_loss import ScoreLoss, matching
from itm_fast.ops.triplet_loss import check_beside, check_scores, upcast
from itm_fast.reference import validation

__all__ = ["CMPMLoss"]

_EPSILON = 1e-8


@register("cmpm", mining=("all",))
class CMPMLoss(ScoreLoss):
    """Cross-modal projection matching (CMPM): the probabilities of an anchor's candidates against the true matches.

    With `p_ij = exp(scale s_ij) / sum_k exp(scale s_ik)` and `q_ij = y_ij / sum_k y_ik`, y 1 for matching pairs, 0 for
    others, the loss of an anchor i is `sum_j p_ij log(p_ij / (q_ij + 1e-8))`.

    Args:
        scale: factor of the scores before the softmax, positive. Published: 1, for projections of any length; scores
            within [-1, 1] leave the probabilities nearly equal unless they are scaled up.
        directions: "both", "rows" (image-to-text: an anchor per row) or "columns" (text-to-image).
        reduction: "sum"; "mean" divides the sum by B (published); "none" keeps the anchors apart.

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of bounds.

    Source: Zhang and Lu, Deep Cross-Modal Projection Learning for Image-Text Matching, ECCV 2018; on the scores of a
    model in the comparison of Deep Boosting Learning (Table III, "CMPM [62]").
    """

    def __init__(self, *, scale: float = 1.0, directions: str = "both", reduction: str = "sum") -> None:
        super().__init__(directions, reduction)
        self.scale = validation.finite_number("scale", scale, minimum=0.0, non_zero=True)

    def forward(
        self, scores: Tensor, *, positives: Tensor | None = None, column_scores: Tensor | None = None
    ) -> Tensor:
        """Loss of `scores` (B, B).

        Args:
            scores: float32, float64, bfloat16 or float16, image-to-text over a row, matching pairs on the diagonal.
            positives: bool (B, B), True for further pairs that match, such as captions of the same image.
            column_scores: (B, B) in the dtype of `scores`: where given, text-to-image is computed from its columns. The
                publication projects one modality, unnormalised, on the normalised other one, so that embeddings x of
                images and z of captions give two matrices: `scores = x @ l2norm(z).T` and
                `column_scores = l2norm(x) @ z.T`. One matrix of scores serves both directions otherwise.

        Returns:
            Scalar, or with reduction "none" (2, B) with image-to-text in row 0 (one direction alone: (B,)). float32, or
            float64 for float64 scores.

        Raises:
            TypeError: an argument is not a tensor of a supported dtype.
            ValueError: a shape or device does not fit.
        """
        check_scores(scores, positives, square=True)
        columns = scores
        if column_scores is not None:
            check_beside("column_scores", column_scores, scores)
            columns = column_scores
        matches = matching(scores)
        if positives is not None:
            matches = matches | positives
        return self._reduced_from(
            lambda: self._of_rows(upcast(scores), matches), lambda: self._of_rows(upcast(columns).t(), matches.t())
        )

    def _of_rows(self, scores: Tensor, matches: Tensor) -> Tensor:
        p = torch.log_softmax(self.scale * scores, dim=1)
        q = matches.to(scores.dtype) / matches.sum(dim=1, keepdim=True)
        return (p.exp() * (p - torch.log(q + _EPSILON))).sum(dim=1)
