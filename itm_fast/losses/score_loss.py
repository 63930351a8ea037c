"""What the losses in plain PyTorch share: settings, checks, and the way from a matrix of scores to a number.

Inside: `ScoreLoss`, `DistillationLoss`, `matching`, `reduced`, `log_softmax`, `divergence`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from itm_fast.ops.triplet_loss import DIRECTIONS, REDUCTIONS, check_beside, check_scores, upcast
from itm_fast.reference import validation

__all__ = ["DistillationLoss", "ScoreLoss", "divergence", "log_softmax", "matching", "reduced"]


def matching(scores: Tensor) -> Tensor:
    """Return the mask (B, B) of the matching pairs, the diagonal of `scores` (B, B)."""
    return torch.eye(len(scores), dtype=torch.bool, device=scores.device)


def reduced(each: Tensor, reduction: str) -> Tensor:
    """Reduce losses (B,) or (directions, B) of anchors: "mean" divides their sum by B, "none" keeps them."""
    if reduction == "none":
        return each
    return each.sum() / max(each.shape[-1], 1) if reduction == "mean" else each.sum()


class ScoreLoss(nn.Module):
    """A loss whose terms belong to the rows (image-to-text) and to the columns (text-to-image) of a score matrix."""

    def __init__(self, directions: str, reduction: str) -> None:
        super().__init__()
        validation.check_option("directions", directions, DIRECTIONS)
        validation.check_option("reduction", reduction, REDUCTIONS)
        self.directions, self.reduction = directions, reduction

    def _reduced(self, of_rows: Callable[..., Tensor], *matrices: Tensor) -> Tensor:
        """The loss from `of_rows`, which takes (B, B) matrices and gives the losses (B,) of their rows."""
        return self._reduced_from(lambda: of_rows(*matrices), lambda: of_rows(*(matrix.t() for matrix in matrices)))

    def _reduced_from(self, rows: Callable[[], Tensor], columns: Callable[[], Tensor]) -> Tensor:
        """The loss from the losses (B,) of the anchors of either direction, computed where they are asked for."""
        sides = [side() for side, other in ((rows, "columns"), (columns, "rows")) if self.directions != other]
        return reduced(torch.stack(sides) if self.directions == "both" else sides[0], self.reduction)

    def extra_repr(self) -> str:
        settings = {
            name: value for name, value in vars(self).items() if not name.startswith("_") and name != "training"
        }
        # The settings of every loss stand last.
        settings |= {name: settings.pop(name) for name in ("directions", "reduction")}
        return ", ".join(f"{name}={value!r}" for name, value in settings.items())


class DistillationLoss(ScoreLoss):
    """A loss that makes the scores of a target branch like those of an anchor branch."""

    def forward(self, scores: Tensor, anchor_scores: Tensor, *, positives: Tensor | None = None) -> Tensor:
        """Loss of `scores` (B, B) beside `anchor_scores` (B, B), which receive no gradient.

        Args:
            scores: float32, float64, bfloat16 or float16, positives on the diagonal.
            anchor_scores: in the dtype of `scores`.
            positives: bool (B, B), True for pairs that are no negatives, such as captions of the same image; off the
                diagonal they are left out, so that an anchor's candidates are its positive and its negatives. None:
                all pairs are candidates.

        Returns:
            Scalar, or with reduction "none" (2, B) with image-to-text in row 0 (one direction alone: (B,)). float32, or
            float64 for float64 scores.

        Raises:
            TypeError: an argument is not a tensor of a supported dtype.
            ValueError: a shape or device does not fit.
        """
        check_scores(scores, positives, square=True)
        check_beside("anchor_scores", anchor_scores, scores)
        target, anchor = upcast(scores), upcast(anchor_scores).detach()
        candidates = torch.ones_like(target, dtype=torch.bool) if positives is None else ~positives
        candidates = candidates | matching(target)
        return self._distil(target, anchor, candidates)

    def _distil(self, target: Tensor, anchor: Tensor, candidates: Tensor) -> Tensor:
        """The loss from checked (B, B) scores of the two branches and the bool mask of what is compared."""
        return self._reduced(self._of_rows, target, anchor, candidates)

    def _of_rows(self, target: Tensor, anchor: Tensor, candidates: Tensor) -> Tensor:
        raise NotImplementedError


def log_softmax(scores: Tensor, candidates: Tensor) -> Tensor:
    """Logarithms of the probabilities of each row's candidates; 0, not -inf, in the places of the others."""
    return torch.log_softmax(scores.masked_fill(~candidates, -torch.inf), dim=1).masked_fill(~candidates, 0.0)


def divergence(p: Tensor, q: Tensor, candidates: Tensor) -> Tensor:
    """KL(p || q) of each row, from the logarithms of probabilities that `log_softmax` gives."""
    return (p.exp() * (p - q)).masked_fill(~candidates, 0.0).sum(dim=1)
