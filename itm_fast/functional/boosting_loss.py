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
    """Compute the loss of Deep Boosting Learning: the target must separate pairs further than an anchor branch.

    With the scores s of the target branch and a of the anchor branch, an anchor of one direction has, by `strategy`:

    - "relative": the hinges `[margin + (a_pos - a_neg) - (s_pos - s_neg)]_+` of its negatives;
    - "absolute": the hinges `[(1 - alpha) margin + s_neg - a_neg]_+` of its negatives, and of its positive
      `[alpha margin + a_pos - s_pos]_+`;
    - "both": the mean of the two losses.

    Mining "hardest" (RM and AM) takes the negative with the largest hinge, with fixed margins the one with the largest
    `s_neg - a_neg`, and the positive's hinge once per direction; "all" (RS and AS) adds both up over the negatives, so
    that the positive's counts once per negative. Of equal negatives the lowest index is taken. Without a negative, an
    anchor has only the positive's hinge of "absolute" with "hardest", and otherwise no loss. A NaN score makes the
    loss of its anchors NaN. The hinge has the derivative 0 at 0. Add it to the triplet loss of the target branch.

    Soft margins are smaller where the anchor branch has already separated a pair:
    `upper(r, m, e) = 2 m / (1 + exp((2 / m) (r - e))) - m` and
    `lower(r, m, e) = 2 m / (1 + exp(-(2 / m) (r + e))) - m`, 0 for m = 0.
    "relative" has `upper(a_pos - a_neg, margin, 2)` in the place of its margin, "absolute"
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
            diagonal never is. None: only the diagonal.
        directions: "both", "rows" (image-to-text: an anchor per row) or "columns" (text-to-image).
        reduction: "sum"; "mean" divides the sum by B; "none" keeps the anchors apart.

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

    Source: Diao et al., Deep Boosting Learning: A Brand-new Cooperative Approach for Image-Text Matching,
    Eq 7 to 10, 14 to 20. Eq 19 as printed gives the lower margin the wrong sign, and Eq 20 the negatives' terms.
    """
    return _ops.boosting_loss(
        scores, anchor_scores, strategy, mining, margin, alpha, soft, positives, directions, reduction
    )
