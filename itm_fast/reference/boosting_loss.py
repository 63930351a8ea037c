"""Reference implementation in plain PyTorch of the boosting losses, which use the scores of an anchor branch.

`boosting_loss` has the signature of `itm_fast.functional.boosting_loss`. It supports derivatives of any order and
float64, and runs where no native kernel is available. It does not check its arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from itm_fast.reference.triplet_loss import hardest_of_rows, negatives_of, upcast


def boosting_loss(
    scores: Tensor,
    anchor_scores: Tensor,
    *,
    strategy: str = "absolute",
    mining: str = "hardest",
    margin: float = 0.2,
    alpha: float = 0.5,
    soft: bool = False,
    positives: Tensor | None = None,
    directions: str = "both",
    reduction: str = "sum",
) -> Tensor:
    """Compute the boosting loss; see `itm_fast.functional.boosting_loss`."""
    scores, anchor_scores = upcast(scores), upcast(anchor_scores).detach()
    negatives = negatives_of(scores, positives, diagonal=True)

    def of_rows(s: Tensor, a: Tensor, negatives: Tensor) -> Tensor:
        losses = []
        if strategy != "absolute":
            losses.append(_relative_of_rows(s, a, negatives, mining, margin, soft))
        if strategy != "relative":
            losses.append(_absolute_of_rows(s, a, negatives, mining, alpha * margin, (1 - alpha) * margin, soft))
        return torch.stack(losses).mean(dim=0)

    losses = []
    if directions != "columns":
        losses.append(of_rows(scores, anchor_scores, negatives))
    if directions != "rows":
        losses.append(of_rows(scores.t(), anchor_scores.t(), negatives.t()))
    each = torch.stack(losses)  # (directions, B)
    if reduction == "none":
        return each if directions == "both" else each[0]
    return each.sum() / max(each.shape[1], 1) if reduction == "mean" else each.sum()


def _relative_of_rows(s: Tensor, a: Tensor, negatives: Tensor, mining: str, margin: float, soft: bool) -> Tensor:
    # margin + (a_pos - a_neg) - (s_pos - s_neg). Subtract a from s per pair first, so that rounding does not change
    # which negative is the hardest.
    gap, own = s - a, a.diagonal()[:, None]
    margins = _upper(own - a, margin, 2.0) if soft else margin
    positive = gap.diagonal()
    return _mined(margins + gap - positive[:, None], gap + margins if soft else gap, negatives, mining, positive)


def _absolute_of_rows(
    s: Tensor, a: Tensor, negatives: Tensor, mining: str, margin_1: float, margin_2: float, soft: bool
) -> Tensor:
    gap = s - a
    own = (_upper(a.diagonal(), margin_1, 1.0) if soft else margin_1) - gap.diagonal()
    positive_terms = torch.relu(own)
    margins = _lower(a, margin_2, 1.0) if soft else margin_2
    negative_terms = _mined(margins + gap, gap + margins if soft else gap, negatives, mining, torch.zeros_like(own))
    counts = negatives.sum(dim=1) if mining == "all" else torch.ones_like(own)
    # A term with count 0 is 0, even if it is infinite. A NaN propagates.
    never = (counts == 0) & ~own.isnan()
    return negative_terms + torch.where(never, 0.0, positive_terms) * torch.where(counts == 0, 1, counts)


def _mined(terms: Tensor, keys: Tensor, negatives: Tensor, mining: str, positive: Tensor) -> Tensor:
    """Return per row the sum of the hinges over its negatives, or the hinge of the negative with the highest key."""
    hinges = torch.where(negatives, torch.relu(terms), 0.0)
    if mining == "all" or terms.shape[1] == 0:
        losses = hinges.sum(dim=1)
    else:
        losses = hinges.gather(1, hardest_of_rows(keys, negatives)[1].clamp(min=0)[:, None])[:, 0]
    # A row without negatives has loss 0. A NaN propagates.
    without = torch.where(positive.isnan(), positive, 0.0).detach()
    return torch.where(negatives.any(dim=1), losses, without)


def _upper(r: Tensor, margin: float, end: float) -> Tensor:
    """Return a soft margin that falls from `margin` to 0 as r approaches its maximum `end`."""
    if margin < torch.finfo(torch.float32).tiny:
        return torch.zeros_like(r)
    return 2 * margin / (1 + torch.exp(2 / margin * (r - end))) - margin


def _lower(r: Tensor, margin: float, end: float) -> Tensor:
    """Return a soft margin that rises from 0 as r increases from its minimum `-end`."""
    if margin < torch.finfo(torch.float32).tiny:
        return torch.zeros_like(r)
    return 2 * margin / (1 + torch.exp(-2 / margin * (r + end))) - margin
