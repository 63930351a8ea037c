"""Triplet losses of a score matrix, and its hardest negatives."""

from __future__ import annotations

from torch import Tensor

from itm_fast.ops import triplet_loss as _ops

__all__ = ["hardest_negatives", "triplet_loss"]


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
    """Compute the triplet loss of a score matrix, image-to-text over rows and text-to-image over columns.

    With the hinge `h(s) = [margin + s - s_pos]_+` of a negative score s, an anchor's loss is, by `mining`:

    - "all": the sum of h over its negatives (VSE, SCAN without `max_violation`);
    - "hardest": h of its highest-scoring negative (VSE++, SCAN);
    - "selective" (SelHN): h of the hardest where `|s_hardest - s_pos| > epsilon` (always, for epsilon 0), else the sum
      of h over all negatives divided by the batch size;
    - "semi_hard" (SHN): h of the hardest among the negatives that score below the positive;
    - "sct" (SCT): h of the hardest where that scores below the positive, else `s_hardest` itself.

    Among equal scores the negative with the lowest index counts as the hardest. An anchor without a negative has the
    loss 0; a NaN score makes the loss of its anchors NaN. The derivative of the hinge at 0 is 0. With "hardest" the
    gradient is exactly zero except at the positives and the chosen negatives.

    Args:
        scores: `(n, m)` float32, float64, bfloat16 or float16: **images are rows**, captions are columns. Square, with
            the positives on the diagonal, unless `positive_scores` is given.
        margin: finite.
        mining: see above.
        epsilon: threshold of "selective", finite and not negative.
        selective_divisor: for "selective", the divisor of the sum over all negatives: "batch", the batch size B, or
            "negatives", B - 1. With `positive_scores`, B is the number of an anchor's candidates plus one.
        halve: halve the loss: the average of the two directions rather than their sum (as SelHN's public code).
        positives: bool `(n, m)`, True for pairs that are not negatives, such as captions of the same image. The
            diagonal is always positive. None: only the diagonal is positive.
        positive_scores: the anchors' positive scores, `(n,)` for directions "rows", `(m,)` for "columns", in the dtype
            of `scores`, which then holds negatives only.
        directions: "both", "rows" (image-to-text: an anchor per row) or "columns" (text-to-image).
        reduction: "sum"; "mean" divides the sum by the number of anchors of one direction; "none" returns one loss per
            anchor.

    Returns:
        Scalar, or with reduction "none" `(2, B)` with image-to-text in row 0 (only one direction: one loss per anchor).
        float32, or float64 for float64 scores.

    Raises:
        TypeError: `scores`, `positives` or `positive_scores` is not a tensor of a supported dtype.
        ValueError: a shape or device does not fit, an option is unknown, or a number is not finite.

    Examples:
        >>> import torch
        >>> import itm_fast.functional as F_itm
        >>> scores = torch.tensor([[0.8, 0.7], [0.1, 0.6]], requires_grad=True)
        >>> loss = F_itm.triplet_loss(scores, margin=0.2, mining="hardest")
        >>> round(loss.item(), 4)
        0.4
        >>> loss.backward()
        >>> scores.grad.tolist()
        [[-1.0, 2.0], [0.0, -1.0]]

    Source: VSE++ (Faghri et al., BMVC 2018), Eq 5 and 6; SelHN and RVSE++ (Eq 12); SCT (Xuan et al., ECCV 2020).
    """
    return _ops.triplet_loss(
        scores, margin, mining, epsilon, selective_divisor, halve, positives, positive_scores, directions, reduction
    )


def hardest_negatives(
    scores: Tensor, positives: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Find the highest-scoring negative of every row (image) and of every column (caption).

    Args:
        scores: `(n, n)` float32, float64, bfloat16 or float16: **images are rows**, positives are on the diagonal.
        positives: bool `(n, n)`, True for further pairs that are not negatives; None: only the diagonal.

    Returns:
        `((values, indices), (values, indices))` of the rows and of the columns, each `(n,)`. Values are float32
        (float64 for float64 scores) and differentiable, indices int64. Of equal scores the lowest index is taken, a NaN
        counts as the hardest, and an anchor without a negative has the value -inf and the index -1.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype.
        ValueError: `scores` is not square, or `positives` does not fit it.

    Examples:
        >>> import torch
        >>> import itm_fast.functional as F_itm
        >>> scores = torch.tensor([[0.9, 0.2, 0.5], [0.1, 0.8, 0.3], [0.4, 0.6, 0.7]])
        >>> (_, captions), (_, images) = F_itm.hardest_negatives(scores)
        >>> captions.tolist(), images.tolist()
        ([2, 2, 1], [2, 2, 0])
    """
    return _ops.hardest_negatives(scores, positives)
