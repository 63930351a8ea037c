"""`BoostingLoss`: `itm_fast.functional.boosting_loss` as a module."""

from __future__ import annotations

from torch import Tensor, nn

from itm_fast.functional import boosting_loss
from itm_fast.ops.boosting_loss import check_options


class BoostingLoss(nn.Module):
    """Boosting loss with fixed settings; see `itm_fast.functional.boosting_loss` for all formulas.

    With the scores s of the target and a of the anchor branch, of an anchor's hardest negative or of all of them:
    "relative" is `[margin + (a_pos - a_neg) - (s_pos - s_neg)]_+`, "absolute"
    `[alpha margin + a_pos - s_pos]_+ + [(1 - alpha) margin + s_neg - a_neg]_+`, "both" the mean of the two.

    Args:
        margin: finite and not negative.
        strategy: "relative", "absolute" or "both".
        mining: "hardest" or "all".
        alpha: the positives' share of the margin of "absolute", within [0, 1].
        soft: soft margins instead of fixed ones.
        directions: "both", "rows" or "columns".
        reduction: "sum" (published), "mean" over B or "none".

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of bounds.

    Source: Diao et al., Deep Boosting Learning: A Brand-new Cooperative Approach for Image-Text Matching, IEEE TIP
    2024, Eq 7 to 10, 14 to 20.
    """

    def __init__(
        self,
        margin: float = 0.2,
        *,
        strategy: str = "absolute",
        mining: str = "hardest",
        alpha: float = 0.5,
        soft: bool = False,
        directions: str = "both",
        reduction: str = "sum",
    ) -> None:
        super().__init__()
        self.margin, self.alpha = check_options(strategy, mining, margin, alpha, soft, directions, reduction)
        self.strategy = strategy
        self.mining = mining
        self.soft = soft
        self.directions = directions
        self.reduction = reduction

    def forward(self, scores: Tensor, anchor_scores: Tensor, *, positives: Tensor | None = None) -> Tensor:
        """Loss of `scores` (B, B) beside `anchor_scores` (B, B), which receive no gradient."""
        return boosting_loss(
            scores,
            anchor_scores,
            strategy=self.strategy,
            mining=self.mining,
            margin=self.margin,
            alpha=self.alpha,
            soft=self.soft,
            positives=positives,
            directions=self.directions,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        alpha = "" if self.strategy == "relative" else f", alpha={self.alpha}"
        return (
            f"margin={self.margin}, strategy={self.strategy!r}, mining={self.mining!r}{alpha}, soft={self.soft}, "
            f"directions={self.directions!r}, reduction={self.reduction!r}"
        )
