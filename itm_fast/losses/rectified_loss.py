"""Losses for pairs that may not match: NCR's per-pair loss, its labels and its soft margins.

Inside: `pair_losses`, `predicted_labels`, `soft_margins`, `rectified_losses`.

Source: Huang et al., "Learning with Noisy Correspondence for Cross-modal Matching" (NeurIPS 2021), section 3. Where its
official code differs from the paper, the paper counts: a caption's margin is that of its own pair, and each pair has
its own predicted label.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.ops.triplet_loss import upcast

__all__ = ["SOFT_MARGINS", "pair_losses", "predicted_labels", "rectified_losses", "soft_margins"]

SOFT_MARGINS = ("exponential", "linear", "sine")
# Of the batch, which sets the scale of predicted labels.
_TOP_SHARE = 10


def pair_losses(scores: Tensor, margin: float, *, positives: Tensor | None = None) -> Tensor:
    """Return the loss (B,) of each pair: the means of the hinges of its row and its column, over B.

    Args:
        scores: (B, B), images are rows, pairs on the diagonal.
        margin: of the hinges.
        positives: bool (B, B), True for further pairs that are not negatives.
    """
    scores = upcast(scores)
    own = scores.diagonal()
    excluded = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    if positives is not None:
        excluded = excluded | positives
    rows, columns = (
        torch.relu(margin + scores - positive).masked_fill(excluded, 0.0).mean(dim=dim)
        for positive, dim in ((own[:, None], 1), (own[None, :], 0))
    )
    return rows + columns


def predicted_labels(scores: Tensor, margin: float, *, positives: Tensor | None = None) -> Tensor:
    """Return how well each pair of a batch matches by its scores, (B,) from 0 to 1.

    `[margin - loss / 2]` is cut to [0, margin], divided by the mean of the greatest B // 10 + 1 of the batch, and cut
    at 1.
    """
    found = (margin - pair_losses(scores, margin, positives=positives) / 2).clamp(0.0, margin)
    top = found.topk(len(found) // _TOP_SHARE + 1).values if len(found) else found
    scale = top.mean() if len(found) else found.new_ones(())
    return torch.where(scale > 0, found / scale.clamp(min=torch.finfo(found.dtype).tiny), 0.0).clamp(max=1.0)


def soft_margins(labels: Tensor, margin: float, form: str = "exponential") -> Tensor:
    """Return a margin for each label from 0 to 1: 0 for 0 and `margin` for 1.

    Args:
        labels: any shape.
        margin: that of a matching pair.
        form: "exponential", `(10^y - 1) / 9`; "linear"; or "sine", `(1 + sin(pi (y - 1 / 2))) / 2`.
    """
    if form == "exponential":
        return margin * (torch.pow(10.0, labels) - 1) / 9
    if form == "linear":
        return margin * labels
    if form == "sine":
        return margin * (1 + torch.sin(math.pi * (labels - 0.5))) / 2
    raise ValueError(f"form: expected {', '.join(SOFT_MARGINS)}, got {form!r}")


def rectified_losses(scores: Tensor, margins: Tensor, *, positives: Tensor | None = None) -> Tensor:
    """Return the loss (B,) of each pair: the hinges of its hardest caption and of its hardest image, added.

    Args:
        scores: (B, B), images are rows, pairs on the diagonal.
        margins: (B,) the margin of each pair.
        positives: bool (B, B), True for further pairs that are not negatives.
    """
    own, margins = upcast(scores).diagonal(), upcast(margins).detach()
    total = torch.zeros_like(own)
    for hardest, _ in F_itm.hardest_negatives(scores, positives):
        # A pair without a negative has the hardest score -inf, whose hinge must have no gradient.
        idle = hardest + margins <= own
        total = total + torch.where(idle, 0.0, margins + hardest.masked_fill(idle, 0.0) - own)
    return total
