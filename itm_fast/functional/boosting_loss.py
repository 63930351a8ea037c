"""The loss of Deep Boosting Learning, whose margins depend on the scores of an anchor branch."""

from __future__ import annotations

from torch import Tensor

from itm_fast.ops import boosting_loss as _ops

__all__ = ["boosting_loss"]


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
    """Compute the loss of Deep Boosting Learning: separate pairs further than an anchor branch does.

    Let s be the scores of the target branch and a those of the anchor branch. Each image (row) and each caption
    (column) is a query. By `strategy`, its loss is made of:

    - "relative": the hinges `[margin + (a_pos - a_neg) - (s_pos - s_neg)]_+` of its negatives;
    - "absolute": the hinges `[(1 - alpha) margin + s_neg - a_neg]_+` of its negatives, and the hinge
      `[alpha margin + a_pos - s_pos]_+` of its positive;
    - "both": the mean of the two losses.

    Mining "hardest" (RM, AM) takes the negative with the largest hinge (with fixed margins, the largest
    `s_neg - a_neg`; of equal ones, the lowest index) and counts the positive's hinge once per direction. "all" (RS, AS)
    sums over the negatives, so that the positive's hinge counts once per negative. A query without negatives has the
    loss 0, except that "absolute" with "hardest" keeps the positive's hinge. A NaN score makes the losses of its
    queries NaN. The derivative of a hinge at 0 is 0. Add the result to the triplet loss of the target branch.

    Soft margins are smaller where the anchor branch has already separated a pair:
    `upper(r, m, e) = 2 m / (1 + exp((2 / m) (r - e))) - m` and
    `lower(r, m, e) = 2 m / (1 + exp(-(2 / m) (r + e))) - m`, 0 for m = 0.
    "relative" has `upper(a_pos - a_neg, margin, 2)` in place of its margin, "absolute"
    `upper(a_pos, alpha margin, 1)` and `lower(a_neg, (1 - alpha) margin, 1)`; scores are taken to lie within [-1, 1].

    Args:
        scores: `(B, B)` float32, float64, bfloat16 or float16 scores of the target branch: **images are rows**,
            positives are on the diagonal.
        anchor_scores: `(B, B)` scores of the anchor branch in the dtype of `scores`. They receive no gradient.
        strategy: "relative", "absolute" or "both".
        mining: "hardest" or "all".
        margin: finite and not negative.
        alpha: the positives' share of the margin of "absolute", within [0, 1].
        soft: soft margins instead of fixed ones.
        positives: bool `(B, B)`, True for pairs that are not negatives, such as captions of the same image. The
            diagonal is always positive. None: only the diagonal is positive.
        directions: "both", "rows" (image-to-text: a query per row) or "columns" (text-to-image).
        reduction: "sum"; "mean" divides the sum by B; "none" returns one loss per query.

    Returns:
        Scalar, or with reduction "none" `(2, B)` with image-to-text in row 0 (one direction alone: `(B,)`). float32, or
        float64 for float64 scores.

    Raises:
        TypeError: `scores`, `anchor_scores` or `positives` is not a tensor of a supported dtype.
        ValueError: a shape or device does not fit, an option is unknown, or a number is out of bounds.

    Examples:
        >>> import torch
        >>> import itm_fast.functional as F_itm
        >>> anchor = torch.tensor([[0.6, 0.3], [0.2, 0.5]])
        >>> scores = torch.tensor([[0.9, 0.3], [0.0, 0.6]], requires_grad=True)
        >>> loss = F_itm.boosting_loss(scores, anchor, strategy="relative", margin=0.2)
        >>> round(loss.item(), 4)
        0.1
        >>> loss.backward()
        >>> scores.grad.tolist()
        [[0.0, 1.0], [0.0, -1.0]]

    Source: Diao et al., Deep Boosting Learning: A Brand-new Cooperative Approach for Image-Text Matching, Eq 7 to 10,
    14 to 20. Eq 19 as printed gives the lower margin the wrong sign, as does Eq 20 for the terms of the negatives.
    """
    return _ops.boosting_loss(
        scores, anchor_scores, strategy, mining, margin, alpha, soft, positives, directions, reduction
    )
