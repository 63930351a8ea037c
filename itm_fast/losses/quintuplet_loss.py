"""`QuintupletLoss`: triplets with hard negatives of the whole training set beside those of the batch (AOQ)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast.ops.triplet_loss import check_scores, upcast
from itm_fast.reference import validation

__all__ = ["QuintupletLoss"]


class QuintupletLoss(nn.Module):
    """Adaptive offline quintuplet loss of a score matrix and the scores of four offline pairs per matching pair.

    An image I and its caption T have an offline hard caption T' and an offline hard image I'. I'' is the image of T',
    and T'' a caption of I'. With the hardest negative `on` of the batch, an anchor has the online term
    `[margin + on - s(I, T)]_+ (beta - (off - on) / alpha)`, where `off` is s(I, T') for the image and s(I', T) for the
    caption. To these come `[offline_margin + s - s(I, T)]_+` for s of (I, T'), (I', T), (I', T') and (I'', T'').

    Args:
        margin: of the online negatives.
        offline_margin: of the offline negatives.
        alpha: distance of offline and online scores that changes the weight by 1, above 0.
        beta: weight of an online negative that is as hard as the offline one.
        reduction: "sum" (published), or "mean" over B.

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of bounds.

    Source: Chen et al., Adaptive Offline Quintuplet Loss for Image-Text Matching, ECCV 2020, Eqs 4 to 8, in the form of
    its official code: gradients also pass through the weight of an online term.
    """

    def __init__(
        self,
        margin: float = 0.2,
        *,
        offline_margin: float = 0.0,
        alpha: float = 0.3,
        beta: float = 1.5,
        reduction: str = "sum",
    ) -> None:
        super().__init__()
        self.margin = validation.finite_number("margin", margin)
        self.offline_margin = validation.finite_number("offline_margin", offline_margin)
        self.alpha = validation.finite_number("alpha", alpha, minimum=0.0, non_zero=True)
        self.beta = validation.finite_number("beta", beta)
        validation.check_option("reduction", reduction, ("sum", "mean"))
        self.reduction = reduction

    def forward(self, scores: Tensor, offline: Tensor, *, positives: Tensor | None = None) -> Tensor:
        """Loss of the online scores and the offline scores of a batch.

        Args:
            scores: (B, B), images are rows, positives on the diagonal.
            offline: (4, B), s(I, T'), s(I', T), s(I', T') and s(I'', T'').
            positives: bool (B, B), True for further pairs that are not negatives.

        Returns:
            A scalar, float32, or float64 for float64 scores.

        Raises:
            TypeError: an argument is not a tensor of a supported dtype.
            ValueError: a shape does not fit.
        """
        check_scores(scores, positives, square=True)
        validation.check_tensor("offline", offline, ("4", "B"))
        if offline.shape != (4, len(scores)):
            raise ValueError(f"offline: expected shape (4, {len(scores)}), got {tuple(offline.shape)}")
        (rows, _), (columns, _) = F_itm.hardest_negatives(scores, positives)
        own, hard = upcast(scores).diagonal(), upcast(offline)
        hinges = torch.relu(self.offline_margin + hard - own).sum(dim=0)
        for online, off in ((rows, hard[0]), (columns, hard[1])):
            # Asked this way round, a NaN stays visible; without a negative, `online` is -inf.
            idle = self.margin + online <= own
            online = online.masked_fill(idle, 0.0)
            term = (self.margin + online - own) * (self.beta - (off - online) / self.alpha)
            hinges = hinges + torch.where(idle, 0.0, term)
        return hinges.mean() if self.reduction == "mean" else hinges.sum()

    def extra_repr(self) -> str:
        names = ("margin", "offline_margin", "alpha", "beta", "reduction")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
