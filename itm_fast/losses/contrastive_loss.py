"""`InfoNCELoss` and `SigLIPLoss`: contrastive losses with a learned scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from itm_fast.losses.registry import register
from itm_fast.losses.score_loss import ScoreLoss, matching, reduced
from itm_fast.ops.triplet_loss import REDUCTIONS, check_scores, upcast
from itm_fast.reference import validation

__all__ = ["InfoNCELoss", "SigLIPLoss"]

LARGEST_SCALE = 100.0


@register("infonce", mining=("all",))
class InfoNCELoss(ScoreLoss):
    """Symmetric cross-entropy of scaled scores (InfoNCE), as CLIP is trained.

    The loss of an anchor i is `-log(exp(t s_ii) / sum_j exp(t s_ij))`. The scale t is learned as `log_scale`. It is
    cut to at most 100 before each use. The default adds all anchors. CLIP's published form is
    `InfoNCELoss(halve=True, reduction="mean")`.

    Args:
        initial_scale: t at the start, at most 100. Published: 1 / 0.07.
        directions: "both", "rows" (image-to-text: an anchor per row) or "columns" (text-to-image).
        halve: average the two directions instead of adding them (published).
        reduction: "sum"; "mean" divides the sum by B (published); "none" keeps the anchors apart.

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of bounds.

    Source: Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021, Figure 3
    and section 2.5.
    """

    def __init__(
        self,
        *,
        initial_scale: float = 1 / 0.07,
        directions: str = "both",
        halve: bool = False,
        reduction: str = "sum",
    ) -> None:
        super().__init__(directions, reduction)
        validation.check_flag("halve", halve)
        self.initial_scale, self.halve = _scale(initial_scale, LARGEST_SCALE), halve
        self.log_scale = nn.Parameter(torch.tensor(math.log(self.initial_scale)))

    def forward(self, scores: Tensor, *, positives: Tensor | None = None) -> Tensor:
        """Compute the loss of `scores` (B, B).

        Args:
            scores: float32, float64, bfloat16 or float16, image-to-text over a row, matching pairs on the diagonal.
            positives: bool (B, B), True for further pairs that match, such as captions of the same image. They are left
                out of the sums over j.

        Returns:
            Scalar, or with reduction "none" (2, B) with image-to-text in row 0 (one direction alone: (B,)). float32, or
            float64 for float64 scores.

        Raises:
            TypeError: an argument is not a tensor of a supported dtype.
            ValueError: a shape or device does not fit.
        """
        check_scores(scores, positives, square=True)
        with torch.no_grad():
            self.log_scale.clamp_(max=math.log(LARGEST_SCALE))
        logits = self.log_scale.exp() * upcast(scores)
        if positives is not None:
            logits = logits.masked_fill(positives & ~matching(scores), -torch.inf)
        loss = self._reduced(lambda rows: -torch.log_softmax(rows, dim=1).diagonal(), logits)
        return loss / 2 if self.halve and self.directions == "both" else loss


@register("siglip", mining=("all",))
class SigLIPLoss(nn.Module):
    """Binary cross-entropy of every pair of the batch, as SigLIP is trained.

    The loss of an image i is `-sum_j log sigmoid(z_ij (t s_ij + b))`, where z is 1 for the matching pair and -1 for all
    others. The scale t is learned as `log_scale`, and the bias b as `bias`. The default adds all images. SigLIP's
    published form is `SigLIPLoss(reduction="mean")`.

    Args:
        initial_scale: t at the start. Published: 10.
        initial_bias: b at the start. Published: -10, because most pairs do not match.
        reduction: "sum"; "mean" divides the sum by B (published); "none" keeps the images apart.

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of bounds.

    Source: Zhai et al., Sigmoid Loss for Language Image Pre-Training, ICCV 2023, Algorithm 1.
    """

    def __init__(self, *, initial_scale: float = 10.0, initial_bias: float = -10.0, reduction: str = "sum") -> None:
        super().__init__()
        validation.check_option("reduction", reduction, REDUCTIONS)
        self.initial_scale, self.reduction = _scale(initial_scale), reduction
        self.initial_bias = validation.finite_number("initial_bias", initial_bias)
        self.log_scale = nn.Parameter(torch.tensor(math.log(self.initial_scale)))
        self.bias = nn.Parameter(torch.tensor(self.initial_bias))

    def forward(self, scores: Tensor, *, positives: Tensor | None = None) -> Tensor:
        """Compute the loss of `scores` (B, B).

        Args:
            scores: float32, float64, bfloat16 or float16, images are rows, matching pairs on the diagonal.
            positives: bool (B, B), True for further pairs that match, such as captions of the same image. They are left
                out.

        Returns:
            Scalar, or (B,) with reduction "none". float32, or float64 for float64 scores.

        Raises:
            TypeError: an argument is not a tensor of a supported dtype.
            ValueError: a shape or device does not fit.
        """
        check_scores(scores, positives, square=True)
        diagonal = matching(scores)
        logits = self.log_scale.exp() * upcast(scores) + self.bias
        pairs = -nn.functional.logsigmoid(torch.where(diagonal, logits, -logits))
        if positives is not None:
            pairs = pairs.masked_fill(positives & ~diagonal, 0.0)
        return reduced(pairs.sum(dim=1), self.reduction)

    def extra_repr(self) -> str:
        return f"initial_scale={self.initial_scale!r}, initial_bias={self.initial_bias!r}, reduction={self.reduction!r}"


def _scale(value: float, largest: float | None = None) -> float:
    return validation.finite_number("initial_scale", value, minimum=0.0, maximum=largest, non_zero=True)
