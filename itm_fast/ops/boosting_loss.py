"""`boosting_loss`: argument checks, autograd Function, fake kernels and fallback."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from itm_fast import reference
from itm_fast.ops.autograd import first_order, refuse_transforms
from itm_fast.ops.library import register_fake, use_native
from itm_fast.ops.one_pass import in_one_pass, taken_gradients
from itm_fast.ops.triplet_loss import DIRECTIONS, REDUCTIONS, check_beside, check_scores, loss_shape, upcast
from itm_fast.reference import validation

STRATEGIES = ("relative", "absolute", "both")
MINING = ("all", "hardest")


def check_options(
    strategy: str, mining: str, margin: float, alpha: float, soft: bool, directions: str, reduction: str
) -> tuple[float, float]:
    """Check the options and return margin and alpha as floats."""
    validation.check_option("strategy", strategy, STRATEGIES)
    validation.check_option("mining", mining, MINING)
    validation.check_flag("soft", soft)
    validation.check_option("directions", directions, DIRECTIONS)
    validation.check_option("reduction", reduction, REDUCTIONS)
    margin = validation.finite_number("margin", margin, minimum=0.0)
    return margin, validation.finite_number("alpha", alpha, minimum=0.0, maximum=1.0)


def boosting_loss(
    scores: Tensor,
    anchor_scores: Tensor,
    strategy: str,
    mining: str,
    margin: float,
    alpha: float,
    soft: bool,
    positives: Tensor | None,
    directions: str,
    reduction: str,
) -> Tensor:
    margin, alpha = check_options(strategy, mining, margin, alpha, soft, directions, reduction)
    check_scores(scores, positives, square=True)
    check_beside("anchor_scores", anchor_scores, scores)
    if not use_native("boosting_loss", scores):
        return reference.boosting_loss(
            scores,
            anchor_scores,
            strategy=strategy,
            mining=mining,
            margin=margin,
            alpha=alpha,
            soft=soft,
            positives=positives,
            directions=directions,
            reduction=reduction,
        )
    refuse_transforms("boosting_loss", scores)
    options = (strategy, mining, margin, alpha, soft, directions, reduction)
    scores = upcast(scores)
    one_pass = in_one_pass(reduction, scores)
    loss: Tensor = _BoostingLoss.apply(scores, upcast(anchor_scores.detach()), positives, options, one_pass)
    return loss


class _BoostingLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        anchor_scores: Tensor,
        positives: Tensor | None,
        options: tuple[Any, ...],
        one_pass: bool,
    ) -> Tensor:
        operators = torch.ops.itm_fast
        function = operators.boosting_loss_with_gradient if one_pass else operators.boosting_loss
        loss, negatives, *gradients = function(scores, anchor_scores, positives, *options)
        ctx.one_pass, ctx.gradients = one_pass, gradients
        ctx.save_for_backward(scores, anchor_scores, positives, negatives)
        ctx.options = options
        return loss

    @staticmethod
    @first_order("boosting_loss")
    def backward(ctx: Any, saved: tuple[Any, ...], grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        operators = torch.ops.itm_fast
        gradients = taken_gradients(
            ctx, grad_loss, lambda: operators.boosting_loss_with_gradient(*saved[:3], *ctx.options)[2:]
        )
        if gradients is not None:
            return gradients[0], None, None, None, None
        grad_scores = operators.boosting_loss_backward(grad_loss, *saved, *ctx.options)
        return grad_scores, None, None, None, None


@register_fake("boosting_loss")
def _boosting_loss_fake(
    scores: Tensor,
    anchor_scores: Tensor,
    positives: Tensor | None,
    strategy: str,
    mining: str,
    margin: float,
    alpha: float,
    soft: bool,
    directions: str,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    anchors = scores.shape[0]
    kept = (2 if strategy == "both" else 1, 2 if directions == "both" else 1, 0 if mining == "all" else anchors)
    return scores.new_empty(loss_shape(anchors, directions, reduction)), scores.new_empty(kept, dtype=torch.int64)


@register_fake("boosting_loss_backward")
def _boosting_loss_backward_fake(grad_loss: Tensor, scores: Tensor, *_: Any) -> Tensor:
    return scores.new_empty(scores.shape)


@register_fake("boosting_loss_with_gradient")
def _boosting_loss_with_gradient_fake(
    scores: Tensor, anchor_scores: Tensor, positives: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return *_boosting_loss_fake(scores, anchor_scores, positives, *options), scores.new_empty(scores.shape)
