"""What Deep Boosting Learning is compared with: losses that make a target branch imitate an anchor branch.

Inside: `DMLLoss`, `DINOLoss`, `RKDLoss`, `SoftRankLoss`. Each takes the scores of the target and of the anchor branch,
as `BoostingLoss` does, and is added to the loss of the target branch.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from itm_fast.losses.score_loss import DistillationLoss, divergence, log_softmax
from itm_fast.reference import validation

__all__ = ["DINOLoss", "DMLLoss", "RKDLoss", "SoftRankLoss"]

MAX_LIST_LENGTH = 6
TRANSFERS = ("soft", "hard", "dbl")
# So far below every score that a place in a list which nothing fills comes last for certain.
_BELOW = -1e4
_LEAST_DISTANCE = 1e-8


class DMLLoss(DistillationLoss):
    """Deep mutual learning (DML): the target's probabilities approach those of the anchor branch.

    With `p = softmax(scale a)` of the anchor branch's scores and `q = softmax(scale s)` of the target's over the
    candidates of an anchor, its loss is `KL(p || q) = sum_j p_j log(p_j / q_j)`.

    Args:
        scale: factor of the scores before the softmax, positive.
        directions: "both", "rows" (image-to-text: an anchor per row) or "columns" (text-to-image).
        reduction: "sum"; "mean" divides the sum by B; "none" keeps the anchors apart.

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of bounds.

    Source: Zhang et al., Deep Mutual Learning, CVPR 2018; in Deep Boosting Learning (Table II, "DML [25]") each pair of
    a batch is a class, and CMPM's softmax over the scores its probability. Of two branches that learn from each other
    each takes the other one as its anchor branch.
    """

    def __init__(self, *, scale: float = 1.0, directions: str = "both", reduction: str = "sum") -> None:
        super().__init__(directions, reduction)
        self.scale = validation.finite_number("scale", scale, minimum=0.0, non_zero=True)

    def _of_rows(self, target: Tensor, anchor: Tensor, candidates: Tensor) -> Tensor:
        p, q = (log_softmax(self.scale * scores, candidates) for scores in (anchor, target))
        return divergence(p, q, candidates)


class DINOLoss(DistillationLoss):
    """The cross-entropy of DINO between an anchor branch (its teacher) and the target (its student), and DINO*.

    With `p = softmax(anchor_scale a)` and `q = softmax(scale s)` over the candidates of an anchor, its loss is
    `H(p, q) = -sum_j p_j log q_j`; `inverse` has `H(q, p)` instead, DINO* of Deep Boosting Learning, so that the target
    need not cover all modes of the anchor branch. With `divergence` they are `KL(p || q)` and `KL(q || p)`: the first
    one has the gradient of the cross-entropy, the second one beside it keeps the target from ever sharper scores.

    Args:
        scale: factor of the target's scores before the softmax, positive: the inverse of DINO's temperature 0.1.
        anchor_scale: factor of the anchor branch's scores, positive: the inverse of DINO's temperature 0.04.
        inverse: DINO*.
        divergence: the divergence in the place of the cross-entropy, as DBL's public code has DINO*.
        directions: "both", "rows" (image-to-text: an anchor per row) or "columns" (text-to-image).
        reduction: "sum"; "mean" divides the sum by B; "none" keeps the anchors apart.

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of bounds.

    Source: Caron et al., Emerging Properties in Self-Supervised Vision Transformers, ICCV 2021, Eq 3; Deep Boosting
    Learning (Table II, "DINO [28]" and "DINO* [28]"), where each pair of a batch is a class. DINO's centre is left out:
    a running mean per class means nothing for classes that are the pairs of one batch.
    """

    def __init__(
        self,
        *,
        scale: float = 10.0,
        anchor_scale: float = 25.0,
        inverse: bool = False,
        divergence: bool = False,
        directions: str = "both",
        reduction: str = "sum",
    ) -> None:
        super().__init__(directions, reduction)
        self.scale = validation.finite_number("scale", scale, minimum=0.0, non_zero=True)
        self.anchor_scale = validation.finite_number("anchor_scale", anchor_scale, minimum=0.0, non_zero=True)
        validation.check_flag("inverse", inverse)
        validation.check_flag("divergence", divergence)
        self.inverse, self.divergence = inverse, divergence

    def _of_rows(self, target: Tensor, anchor: Tensor, candidates: Tensor) -> Tensor:
        p, q = log_softmax(self.anchor_scale * anchor, candidates), log_softmax(self.scale * target, candidates)
        if self.inverse:
            p, q = q, p
        if self.divergence:
            return divergence(p, q, candidates)
        return -(p.exp() * q).masked_fill(~candidates, 0.0).sum(dim=1)


class RKDLoss(DistillationLoss):
    """Relational knowledge distillation by distance (RKD-D): the target's distances approach the anchor branch's.

    The distance of a pair is `d = 1 - s`, divided by the mean of d over all pairs of its branch's matrix,
    `psi = d / mean`; the loss of an anchor is `weight` times the mean over its candidates of
    `huber(psi_target - psi_anchor)`, where `huber(x)` is `x^2 / 2` up to `|x| = 1` and `|x| - 1/2` beyond.

    Args:
        normalize: divide distances by their mean, so that only their proportions are handed on (published); DBL's
            public code does not.
        weight: factor of the loss, not negative. DBL's public code: 10.
        directions: "both", "rows" (image-to-text: an anchor per row) or "columns" (text-to-image).
        reduction: "sum"; "mean" divides the sum by B, which without masks is the mean over all pairs (published) in one
            direction, and twice that in both; "none" keeps the anchors apart.

    Raises:
        TypeError, ValueError: a setting is of the wrong kind.

    Source: Park et al., Relational Knowledge Distillation, CVPR 2019, whose distances are those of embeddings of one
    network; Deep Boosting Learning (Table II, "RKD [32]", distance) takes the predicted scores directly, which are
    taken to lie within [-1, 1].
    """

    def __init__(
        self, *, normalize: bool = True, weight: float = 1.0, directions: str = "both", reduction: str = "sum"
    ) -> None:
        super().__init__(directions, reduction)
        validation.check_flag("normalize", normalize)
        self.normalize = normalize
        self.weight = validation.finite_number("weight", weight, minimum=0.0)

    def _distil(self, target: Tensor, anchor: Tensor, candidates: Tensor) -> Tensor:
        count = candidates.sum().clamp(min=1)

        def relation(scores: Tensor) -> Tensor:
            distances = 1 - scores
            if not self.normalize:
                return distances
            mean = distances.masked_fill(~candidates, 0.0).sum() / count
            return distances / mean.clamp(min=_LEAST_DISTANCE)

        return self._reduced(self._of_rows, relation(target), relation(anchor), candidates)

    def _of_rows(self, target: Tensor, anchor: Tensor, candidates: Tensor) -> Tensor:
        losses = smooth_l1_loss(target, anchor, reduction="none").masked_fill(~candidates, 0.0)
        return self.weight * losses.sum(dim=1) / candidates.sum(dim=1)


class SoftRankLoss(DistillationLoss):
    """DarkRank (DR): the target ranks the best candidates of the anchor branch as that one does.

    Of an anchor, the `length` candidates that score highest in the anchor branch (of equal ones those with the lowest
    index; all, where there are fewer) make a list. A permutation pi of it has the probability
    `P(pi | s) = prod_i exp(scale s_pi(i)) / sum_(k >= i) exp(scale s_pi(k))`. The anchor's loss is, by `transfer`:

    - "soft": the divergence `KL(P(. | a) || P(. | s))` over all permutations;
    - "hard": `-log P(pi_a | s)` of the list's own order pi_a alone;
    - "dbl": what DBL's public code has, "hard" with `-3 s^3` and `-3 a^3` in the place of the scores, and without the
      first candidate of the order, so that lists begin at the second lowest score.

    Args:
        length: of the list, 1 to 6: "soft" sums over `length!` permutations. DarkRank's public code: 3; DBL's: 4.
        transfer: "soft", "hard" or "dbl".
        scale: factor of the scores, positive.
        directions: "both", "rows" (image-to-text: an anchor per row) or "columns" (text-to-image).
        reduction: "sum"; "mean" divides the sum by B (published); "none" keeps the anchors apart.

    Raises:
        TypeError, ValueError: a setting is of the wrong kind or out of bounds.

    Source: Chen et al., DarkRank: Accelerating Deep Metric Learning via Cross Sample Similarities Transfer, AAAI 2018;
    Deep Boosting Learning (Table II, "DR [30]", softrank) takes the predicted scores in the place of DarkRank's powers
    of distances. DarkRank's code has the cross-entropy, whose gradient is that of the divergence.
    """

    def __init__(
        self,
        *,
        length: int = 3,
        transfer: str = "soft",
        scale: float = 1.0,
        directions: str = "both",
        reduction: str = "sum",
    ) -> None:
        super().__init__(directions, reduction)
        validation.check_option("transfer", transfer, TRANSFERS)
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"length: expected a whole number, got {validation.describe(length)}")
        if not 1 <= length <= MAX_LIST_LENGTH:
            raise ValueError(f"length: expected a number from 1 to {MAX_LIST_LENGTH}, got {length}")
        self.length, self.transfer = length, transfer
        self.scale = validation.finite_number("scale", scale, minimum=0.0, non_zero=True)

    def _of_rows(self, target: Tensor, anchor: Tensor, candidates: Tensor) -> Tensor:
        first = 0
        if self.transfer == "dbl":
            first, target, anchor = 1, -3 * target**3, -3 * anchor**3
        ranked = anchor.masked_fill(~candidates, -torch.inf).sort(dim=1, descending=True, stable=True).indices
        chosen = ranked[:, first : first + self.length]
        empty = ~candidates.gather(1, chosen)
        p, q = ((self.scale * scores).gather(1, chosen) for scores in (anchor, target))
        if self.transfer != "soft":
            # The anchor's scores give the order alone, in which one that is not a number must not go unseen.
            unknown = (anchor.isnan() & candidates).any(dim=1)
            return (-_log_probability(q, empty)).masked_fill(unknown, torch.nan)
        if chosen.shape[1] == 0:
            return q.sum(dim=1)
        orders = torch.tensor(
            list(itertools.permutations(range(chosen.shape[1]))), dtype=torch.int64, device=target.device
        )  # (length!, length)
        p, q = (_log_probabilities(scores.masked_fill(empty, _BELOW), orders) for scores in (p, q))
        return (p.exp() * (p - q)).sum(dim=1)


def _log_probabilities(scores: Tensor, orders: Tensor) -> Tensor:
    """Logarithms of the probabilities (B, orders) of permutations of lists (B, length)."""
    permuted = scores[:, orders]
    rest = [permuted[:, :, place:].logsumexp(dim=2) for place in range(orders.shape[1])]
    # Place by place, so that the empty ones at the end of a list cancel exactly.
    return (permuted - torch.stack(rest, dim=2)).sum(dim=2)


def _log_probability(scores: Tensor, empty: Tensor) -> Tensor:
    """Logarithms of the probabilities (B,) of the order that lists (B, length) stand in, whose last may be empty."""
    # Finite, unlike -inf, so that the derivative where all that is left of a list is empty is a number, times 0.
    scores = scores.masked_fill(empty, torch.finfo(scores.dtype).min / 2)
    places = [scores[:, place] - scores[:, place:].logsumexp(dim=1) for place in range(scores.shape[1])]
    return torch.stack(places, dim=1).masked_fill(empty, 0.0).sum(dim=1) if places else scores.sum(dim=1)
