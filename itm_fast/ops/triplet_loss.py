"""`triplet_loss` and `hardest_negatives`: argument checks, autograd Functions, fake kernels and fallback."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from itm_fast import reference
from itm_fast.ops.autograd import first_order, refuse_transforms
from itm_fast.ops.library import register_fake, use_native
from itm_fast.ops.one_pass import in_one_pass, taken_gradients
from itm_fast.reference import validation

MINING = ("all", "hardest", "selective", "semi_hard", "sct")
# Deprecated names; `present_mining` replaces them.
_FORMER_MINING = {"contrastive": "sct"}
# Names of the minings in the kernels, if they differ from the public names.
_KERNEL_MINING = {"sct": "contrastive"}
SELECTIVE_DIVISORS = ("batch", "negatives")
DIRECTIONS = ("both", "rows", "columns")
REDUCTIONS = ("sum", "mean", "none")


def present_mining(mining: str) -> str:
    """Return the current name of `mining`; issue a `FutureWarning` for a deprecated name."""
    if not isinstance(mining, str) or mining not in _FORMER_MINING:
        return mining
    new = _FORMER_MINING[mining]
    warnings.warn(
        f"mining {mining!r} is now {new!r}; the old name will be removed in the next release", FutureWarning, 4
    )
    return new


def kernel_mining(mining: str) -> str:
    """Return the name under which the native operators know `mining`."""
    return _KERNEL_MINING.get(mining, mining)


def check_options(
    margin: float,
    mining: str,
    epsilon: float,
    selective_divisor: str,
    halve: bool,
    directions: str,
    reduction: str,
) -> tuple[float, float]:
    """Check the options and return margin and epsilon as floats."""
    validation.check_option("mining", mining, MINING)
    validation.check_option("selective_divisor", selective_divisor, SELECTIVE_DIVISORS)
    validation.check_flag("halve", halve)
    validation.check_option("directions", directions, DIRECTIONS)
    validation.check_option("reduction", reduction, REDUCTIONS)
    return validation.finite_number("margin", margin), validation.finite_number("epsilon", epsilon, minimum=0.0)


def triplet_loss(
    scores: Tensor,
    margin: float,
    mining: str,
    epsilon: float,
    selective_divisor: str,
    halve: bool,
    positives: Tensor | None,
    positive_scores: Tensor | None,
    directions: str,
    reduction: str,
) -> Tensor:
    mining = present_mining(mining)
    margin, epsilon = check_options(margin, mining, epsilon, selective_divisor, halve, directions, reduction)
    check_scores(scores, positives, square=positive_scores is None)
    if positive_scores is not None:
        _check_positive_scores(scores, positive_scores, directions)
    if not use_native("triplet_loss", scores):
        return reference.triplet_loss(
            scores,
            margin=margin,
            mining=mining,
            epsilon=epsilon,
            selective_divisor=selective_divisor,
            halve=halve,
            positives=positives,
            positive_scores=positive_scores,
            directions=directions,
            reduction=reduction,
        )
    refuse_transforms("triplet_loss", scores, *(() if positive_scores is None else (positive_scores,)))
    scores = upcast(scores)
    if positive_scores is not None:
        positive_scores = upcast(positive_scores)
    mining = kernel_mining(mining)
    options = (margin, mining, epsilon, selective_divisor, halve, directions, reduction)
    one_pass = in_one_pass(reduction, scores, positive_scores)
    loss: Tensor = _TripletLoss.apply(scores, positives, positive_scores, options, one_pass)
    return loss


def hardest_negatives(scores: Tensor, positives: Tensor | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    check_scores(scores, positives, square=True)
    if not use_native("hardest_negatives", scores):
        return reference.hardest_negatives(scores, positives)
    refuse_transforms("hardest_negatives", scores)
    row_values, row_indices, column_values, column_indices = _HardestNegatives.apply(upcast(scores), positives)
    return (row_values, row_indices), (column_values, column_indices)


def check_scores(scores: Tensor, positives: Tensor | None, square: bool) -> None:
    """Raise if the scores or their mask have a wrong type, dtype, shape or device."""
    validation.check_tensor("scores", scores, ("n", "m"))
    if square and scores.shape[0] != scores.shape[1]:
        raise ValueError(
            f"scores: expected a square matrix with the positives on its diagonal, got {tuple(scores.shape)}"
        )
    if positives is not None:
        validation.check_tensor("positives", positives, ("n", "m"), (torch.bool,))
        validation.check_shape("positives", positives, scores.shape, "like scores")
        validation.check_same_device("positives", positives, "scores", scores)


def check_beside(name: str, other: Tensor, scores: Tensor) -> None:
    """Raise if a second score matrix does not match `scores`."""
    validation.check_tensor(name, other, ("n", "m"), (scores.dtype,))
    validation.check_shape(name, other, scores.shape, "like scores")
    validation.check_same_device(name, other, "scores", scores)


def _check_positive_scores(scores: Tensor, positive_scores: Tensor, directions: str) -> None:
    if directions == "both":
        raise ValueError(
            "directions: expected 'rows' or 'columns' with positive_scores, which belong to one direction, got 'both'"
        )
    validation.check_tensor(
        "positive_scores", positive_scores, ("n",) if directions == "rows" else ("m",), (scores.dtype,)
    )
    anchors = scores.shape[0 if directions == "rows" else 1]
    validation.check_shape("positive_scores", positive_scores, (anchors,), f"for directions='{directions}'")
    validation.check_same_device("positive_scores", positive_scores, "scores", scores)


def upcast(scores: Tensor) -> Tensor:
    """Cast scores to the dtype of the loss: float64 for float64 scores, float32 otherwise (also under autocast)."""
    return scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores


def loss_shape(anchors: int, directions: str, reduction: str) -> tuple[int, ...]:
    """Return the shape of the loss with `anchors` anchors in each direction."""
    if reduction != "none":
        return ()
    return (2, anchors) if directions == "both" else (anchors,)


class _TripletLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        positives: Tensor | None,
        positive_scores: Tensor | None,
        options: tuple[Any, ...],
        one_pass: bool,
    ) -> Tensor:
        operators = torch.ops.itm_fast
        function = operators.triplet_loss_with_gradient if one_pass else operators.triplet_loss
        loss, negatives, *gradients = function(scores, positives, positive_scores, *options)
        ctx.one_pass, ctx.gradients = one_pass, gradients
        ctx.save_for_backward(scores, positives, positive_scores, negatives)
        ctx.options = options
        return loss

    @staticmethod
    @first_order("triplet_loss")
    def backward(ctx: Any, saved: tuple[Any, ...], grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        positive_scores = saved[2]
        operators = torch.ops.itm_fast
        gradients = taken_gradients(
            ctx, grad_loss, lambda: operators.triplet_loss_with_gradient(*saved[:3], *ctx.options)[2:]
        )
        if gradients is None:
            gradients = operators.triplet_loss_backward(grad_loss, *saved, *ctx.options)
        return gradients[0], None, gradients[1] if positive_scores is not None else None, None, None


class _HardestNegatives(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, positives: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        row_values, row_indices, column_values, column_indices = torch.ops.itm_fast.hardest_negatives(scores, positives)
        ctx.mark_non_differentiable(row_indices, column_indices)
        ctx.save_for_backward(scores, row_indices, column_indices)
        return row_values, row_indices, column_values, column_indices

    @staticmethod
    @first_order("hardest_negatives")
    def backward(
        ctx: Any,
        saved: tuple[Any, ...],
        grad_rows: Tensor,
        _row_indices: Tensor,
        grad_columns: Tensor,
        _column_indices: Tensor,
    ) -> tuple[Tensor | None, ...]:
        grad_scores = torch.ops.itm_fast.hardest_negatives_backward(grad_rows, grad_columns, *saved)
        return grad_scores, None


@register_fake("triplet_loss")
def _triplet_loss_fake(
    scores: Tensor,
    positives: Tensor | None,
    positive_scores: Tensor | None,
    margin: float,
    mining: str,
    epsilon: float,
    selective_divisor: str,
    halve: bool,
    directions: str,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    anchors = scores.shape[1 if directions == "columns" else 0]
    n_directions = 2 if directions == "both" else 1
    negatives = scores.new_empty((n_directions, 0 if mining == "all" else anchors), dtype=torch.int64)
    return scores.new_empty(loss_shape(anchors, directions, reduction)), negatives


@register_fake("triplet_loss_backward")
def _triplet_loss_backward_fake(
    grad_loss: Tensor, scores: Tensor, positives: Tensor | None, positive_scores: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    grad_scores = scores.new_empty(scores.shape)
    return grad_scores, scores.new_empty(0 if positive_scores is None else positive_scores.shape[0])


@register_fake("triplet_loss_with_gradient")
def _triplet_loss_with_gradient_fake(
    scores: Tensor, positives: Tensor | None, positive_scores: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, negatives = _triplet_loss_fake(scores, positives, positive_scores, *options)
    return loss, negatives, *_triplet_loss_backward_fake(loss, scores, positives, positive_scores)


@register_fake("scale_gradient")
def _scale_gradient_fake(gradient: Tensor, factor: Tensor) -> None:
    return None


@register_fake("hardest_negatives")
def _hardest_negatives_fake(scores: Tensor, positives: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = scores.shape
    return (
        scores.new_empty(rows),
        scores.new_empty(rows, dtype=torch.int64),
        scores.new_empty(columns),
        scores.new_empty(columns, dtype=torch.int64),
    )


@register_fake("hardest_negatives_backward")
def _hardest_negatives_backward_fake(
    grad_rows: Tensor, grad_columns: Tensor, scores: Tensor, row_indices: Tensor, column_indices: Tensor
) -> Tensor:
    return scores.new_empty(scores.shape)
