"""`TripletLoss`: the triplet losses of `itm_fast.functional.triplet_loss` as a module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from itm_fast.functional import triplet_loss
from itm_fast.losses.registry import register
from itm_fast.ops.triplet_loss import check_options, present_mining


@register("triplet", mining=("hardest", "all", "selective", "semi_hard", "sct"))
class TripletLoss(nn.Module):
    """Triplet loss of a score matrix with fixed settings; see `itm_fast.functional.triplet_loss` for all formulas.

    With the hinges `[margin + s_neg - s_pos]_+` of an anchor's negatives: "all" adds them up, "hardest" takes the
    largest, "selective" (SelHN) the largest where `|s_hardest - s_pos| > epsilon`, else their sum over B.

    Args:
        margin: finite.
        mining: "all", "hardest", "selective", "semi_hard" or "sct".
        epsilon: threshold of "selective", finite and not negative.
        selective_divisor: "batch" or "negatives".
        halve: the average of the two directions rather than their sum.
        directions: "both", "rows" or "columns".
        reduction: "sum" (as published, except in SelHN's code, which takes the mean), "mean" over B or "none".

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of bounds.

    Source: Faghri et al., VSE++, BMVC 2018, Eq 5 and 6; Li et al., Selectively Hard Negative Mining, 2023, Eq 12;
    Schroff et al., FaceNet, CVPR 2015 ("semi_hard"); Xuan et al., Hard Negative Examples are Hard, but Useful, ECCV
    2020 ("sct").
    """

    def __init__(
        self,
        margin: float = 0.2,
        *,
        mining: str = "hardest",
        epsilon: float = 0.01,
        selective_divisor: str = "batch",
        halve: bool = False,
        directions: str = "both",
        reduction: str = "sum",
    ) -> None:
        super().__init__()
        mining = present_mining(mining)
        self.margin, self.epsilon = check_options(
            margin, mining, epsilon, selective_divisor, halve, directions, reduction
        )
        self.mining = mining
        self.selective_divisor = selective_divisor
        self.halve = halve
        self.directions = directions
        self.reduction = reduction

    @property
    def options(self) -> dict[str, Any]:
        """Return the settings as keyword arguments of `itm_fast.functional.triplet_loss`."""
        return {
            "margin": self.margin,
            "mining": self.mining,
            "epsilon": self.epsilon,
            "selective_divisor": self.selective_divisor,
            "halve": self.halve,
            "directions": self.directions,
            "reduction": self.reduction,
        }

    def forward(
        self, scores: Tensor, *, positives: Tensor | None = None, positive_scores: Tensor | None = None
    ) -> Tensor:
        """Loss of `scores` (n, m); arguments and result are those of `itm_fast.functional.triplet_loss`."""
        return triplet_loss(scores, positives=positives, positive_scores=positive_scores, **self.options)

    def extra_repr(self) -> str:
        selective = f", epsilon={self.epsilon}, selective_divisor={self.selective_divisor!r}"
        return (
            f"margin={self.margin}, mining={self.mining!r}{selective if self.mining == 'selective' else ''}, "
            f"halve={self.halve}, directions={self.directions!r}, reduction={self.reduction!r}"
        )
