"""Reference implementation in plain PyTorch of the triplet losses over a score matrix.

`hardest_negatives` and `triplet_loss` have the signatures of `itm_fast.functional`. They support derivatives of any
order and float64, and run where no native kernel is available. They do not check their arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

Extreme = tuple[Tensor, Tensor]


def hardest_negatives(scores: Tensor, positives: Tensor | None = None) -> tuple[Extreme, Extreme]:
    """Return values and indices of the hardest negative of every row and of every column."""
    scores = upcast(scores)
    negatives = negatives_of(scores, positives, diagonal=True)
    return hardest_of_rows(scores, negatives), hardest_of_rows(scores.t(), negatives.t())


def triplet_loss(
    scores: Tensor,
    *,
    margin: float = 0.2,
    mining: str = "hardest",
    epsilon: float = 0.01,
    selective_divisor: str = "batch",
    halve: bool = False,
    positives: Tensor | None = None,
    positive_scores: Tensor | None = None,
    directions: str = "both",
    reduction: str = "sum",
) -> Tensor:
    """Compute the triplet loss; see `itm_fast.functional.triplet_loss`."""
    scores = upcast(scores)
    negatives = negatives_of(scores, positives, diagonal=positive_scores is None)
    anchors = scores.diagonal() if positive_scores is None else upcast(positive_scores)

    def of_rows(scores: Tensor, negatives: Tensor) -> Tensor:
        # A square batch includes one positive per anchor. Separate positives add one to the batch size.
        batch = scores.shape[1] + (positive_scores is not None)
        divisor = max(batch - (selective_divisor == "negatives"), 1)
        return _losses_of_rows(scores, negatives, anchors, margin, mining, epsilon, divisor)

    losses = []
    if directions != "columns":
        losses.append(of_rows(scores, negatives))
    if directions != "rows":
        losses.append(of_rows(scores.t(), negatives.t()))
    each = torch.stack(losses) * (0.5 if halve else 1.0)  # (directions, B)
    if reduction == "none":
        return each if directions == "both" else each[0]
    return each.sum() / max(each.shape[1], 1) if reduction == "mean" else each.sum()


def _losses_of_rows(
    scores: Tensor,  # (B, m)
    negatives: Tensor,  # (B, m) bool
    positive: Tensor,  # (B,)
    margin: float,
    mining: str,
    epsilon: float,
    divisor: int,
) -> Tensor:  # (B,)
    if mining == "semi_hard":
        # `~(a >= b)` rather than `a < b`, so that a NaN remains a candidate and reaches the loss.
        negatives = negatives & ~(scores >= positive[:, None])
    if mining in ("all", "selective"):
        hinges = torch.relu(margin + scores - positive[:, None])
        average = torch.where(negatives, hinges, 0.0).sum(dim=1) / (divisor if mining == "selective" else 1)
    if mining != "all":
        hardest = best_of_rows(scores, negatives)[0]
        hinge = torch.relu(margin + hardest - positive)

    if mining == "all":
        losses = average
    elif mining == "selective":
        far = (hardest - positive).abs() > epsilon
        losses = hinge if epsilon == 0 else torch.where(far, hinge, average)
    elif mining == "sct":
        # A NaN fails this comparison, selects the hinge and so propagates.
        losses = torch.where(hardest >= positive, hardest, hinge)
    else:
        losses = hinge
    # A row without negatives has loss 0. A NaN propagates.
    without = torch.where(positive.isnan(), positive, 0.0).detach()
    return torch.where(negatives.any(dim=1), losses, without)


def best_of_rows(scores: Tensor, negatives: Tensor) -> Extreme:
    # torch.max returns the first of equal values, and treats NaN as the maximum.
    if scores.shape[1] == 0:
        # An empty sum keeps the values in the autograd graph of the scores.
        return scores.sum(dim=1) - torch.inf, scores.new_zeros(scores.shape[0], dtype=torch.int64)
    return torch.where(negatives, scores, -torch.inf).max(dim=1)


def hardest_of_rows(scores: Tensor, negatives: Tensor) -> Extreme:
    values, indices = best_of_rows(scores, negatives)
    # If the maximum is -inf, its first occurrence may be a masked pair. Take the first negative instead.
    if scores.shape[1] > 0:
        indices = torch.where(values.isneginf(), negatives.to(torch.uint8).argmax(dim=1), indices)
    return values, torch.where(negatives.any(dim=1), indices, -1)


def negatives_of(scores: Tensor, positives: Tensor | None, diagonal: bool) -> Tensor:
    negatives = torch.ones_like(scores, dtype=torch.bool) if positives is None else ~positives
    if diagonal:
        negatives = negatives & ~torch.eye(*scores.shape, dtype=torch.bool, device=scores.device)
    return negatives


def upcast(scores: Tensor) -> Tensor:
    """Cast scores to the dtype of the loss: float64 for float64 scores, float32 otherwise."""
    return scores if scores.dtype == torch.float64 else scores.float()
