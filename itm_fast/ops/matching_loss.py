"""`matching_loss`: argument checks, autograd Function, fake kernel, and the separate operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.ops import boosting_loss as _boosting
from itm_fast.ops import cross_attention as _attention
from itm_fast.ops import triplet_loss as _triplet
from itm_fast.ops.autograd import first_order, refuse_transforms
from itm_fast.ops.library import register_fake, use_native
from itm_fast.ops.one_pass import in_one_pass_from, taken_gradients
from itm_fast.ops.precision import compute_precision
from itm_fast.reference import validation

ATTENTION = ("t2i", "i2t", "sum", "mean")
OF_BOTH = ("sum", "mean")
LOSSES = ("triplet", "boosting")
# Rows of a tile of the CUDA kernels.
TILE_QUERIES, TILE_CONTEXTS = 128, 112
# The options of the losses in the order of the operator, with values for those that a loss does not have.
_UNUSED: dict[str, Any] = {
    "margin": None,
    "mining": None,
    "epsilon": 0.0,
    "selective_divisor": "batch",
    "halve": False,
    "strategy": "absolute",
    "alpha": 0.5,
    "soft": False,
    "directions": None,
    "reduction": None,
}


def matching_loss(
    queries: Fragments,
    contexts: Fragments,
    attention: str,
    loss: str,
    anchor_scores: Tensor | None,
    positives: Tensor | None,
    scoring: dict[str, Any],
    other_scoring: Mapping[str, Any] | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Compute loss and scores.

    `scoring` are the options of the scores, `other_scoring` those of the other direction that differ, `options` those
    of the chosen loss.
    """
    validation.check_option("attention", attention, ATTENTION)
    validation.check_option("loss", loss, LOSSES)
    scorings = [scoring, *_other_scoring(attention, scoring, other_scoring)]
    if (loss == "boosting") != (anchor_scores is not None):
        needed = "the scores of the anchor branch" if loss == "boosting" else "None"
        given = validation.describe(anchor_scores)
        raise ValueError(f"anchor_scores: expected {needed} with loss='{loss}', got {given}")
    queries, contexts = _attention.checked_operands(queries, contexts)
    if len(queries) != len(contexts):
        raise ValueError(
            f"contexts: expected {len(queries)} sets like the queries, of which set i is the positive of set i, "
            f"got {len(contexts)}"
        )
    options = {**options, "mining": _triplet.present_mining(options["mining"])}
    native = use_native("matching_loss", queries.values)
    shape = (len(queries), len(contexts))
    in_one_call = native and in_one_pass_from(options["reduction"], shape, queries.values, contexts.values)
    if not in_one_call or has_long_sets(queries, contexts, attention):
        return _in_separate_calls(queries, contexts, attention, anchor_scores, positives, scorings, options)
    refuse_transforms("matching_loss", queries.values, contexts.values)
    of_attention = tuple(_options_of(one) for one in scorings), compute_precision(queries.values)
    longest = _attention.longest_set(queries), _attention.longest_set(contexts)
    if anchor_scores is None:
        options["margin"], options["epsilon"] = _triplet.check_options(**options)
    else:
        options["margin"], options["alpha"] = _boosting.check_options(**options)
        _check_matrix("anchor_scores", anchor_scores, shape, _attention.score_dtype(queries.values), queries.values)
        anchor_scores = anchor_scores.detach()
    if positives is not None:
        _check_matrix("positives", positives, shape, torch.bool, queries.values)
    options["mining"] = _triplet.kernel_mining(options["mining"])
    operands = (queries.values, queries.offsets, contexts.values, contexts.offsets)
    loss_and_scores: tuple[Tensor, Tensor] = _MatchingLoss.apply(
        *operands, anchor_scores, positives, attention, of_attention, longest, options
    )
    return loss_and_scores


def has_long_sets(queries: Fragments, contexts: Fragments, attention: str) -> bool:
    """Return whether the scores on CUDA have a launch of their own: the longest set, or if its length is unknown the
    average set, is longer than a tile, or a pair may be too large for the backward.
    """
    if queries.device.type != "cuda":
        return False
    if any(_attention.beyond_backward("cuda", *sides) for sides in ((queries, contexts), (contexts, queries))):
        return True
    of_queries = min(TILE_QUERIES, TILE_CONTEXTS) if attention in OF_BOTH else TILE_QUERIES
    sides = ((queries, of_queries), (contexts, TILE_CONTEXTS))
    return any(
        side.max_length > tile if side.knows_max_length else side.values.shape[0] > tile * len(side)
        for side, tile in sides
    )


def _other_scoring(attention: str, scoring: dict[str, Any], changed: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the options of the scores of the other direction, if there is one."""
    if attention not in OF_BOTH:
        if changed is not None:
            raise ValueError(
                f"other_direction: expected None with attention='{attention}', got {validation.describe(changed)}"
            )
        return []
    changed = {} if changed is None else changed
    if not isinstance(changed, Mapping) or not set(changed) <= set(scoring):
        names = ", ".join(map(repr, scoring))
        raise ValueError(f"other_direction: expected a dict with keys of {names}, got {validation.describe(changed)}")
    return [{**scoring, **changed}]


def _options_of(scoring: dict[str, Any]) -> tuple[Any, ...]:
    """Return the options of scores in the order of the operators."""
    temperature, slope, of_logsumexp = _attention.check_options(**scoring)
    focal = scoring["focal"] or "none"
    return temperature, scoring["normalization"], slope, focal, scoring["aggregation"], of_logsumexp


def _in_separate_calls(
    queries: Fragments,
    contexts: Fragments,
    attention: str,
    anchor_scores: Tensor | None,
    positives: Tensor | None,
    scorings: list[dict[str, Any]],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    scores = _attention.cross_attention_scores(queries, contexts, **scorings[0])
    scores = scores if attention == "i2t" else scores.t()
    if attention in OF_BOTH:
        scores = scores + _attention.cross_attention_scores(contexts, queries, **scorings[1])
        scores = scores / 2 if attention == "mean" else scores
    if anchor_scores is None:
        return _triplet.triplet_loss(scores, positives=positives, positive_scores=None, **options), scores
    return _boosting.boosting_loss(scores, anchor_scores, positives=positives, **options), scores


def _check_matrix(name: str, matrix: Tensor, shape: tuple[int, int], dtype: torch.dtype, queries: Tensor) -> None:
    """Raise unless `matrix` has the dtype and shape that the scores of all pairs need, on the device of the queries."""
    validation.check_tensor(name, matrix, ("images", "captions"), (dtype,))
    validation.check_shape(name, matrix, shape, "(images, captions)")
    validation.check_same_device(name, matrix, "queries", queries)


class _MatchingLoss(torch.autograd.Function):
    """Compute loss, scores and the gradient of the scores together; the backward differentiates the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        query_offsets: Tensor,
        contexts: Tensor,
        context_offsets: Tensor,
        anchor_scores: Tensor | None,
        positives: Tensor | None,
        attention: str,
        of_attention: tuple[Any, ...],
        longest: tuple[int, int],  # of the queries and of the contexts
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        operands = (queries, query_offsets, contexts, context_offsets)
        of_loss = [options.get(name, unused) for name, unused in _UNUSED.items()]
        scorings, precision = of_attention
        loss, scores, negatives, gradient = torch.ops.itm_fast.matching_loss(
            *operands, anchor_scores, positives, attention, *scorings[0], precision, *scorings[-1], *of_loss
        )
        ctx.set_materialize_grads(False)
        ctx.one_pass, ctx.gradients = True, [gradient]
        ctx.save_for_backward(*operands, scores, anchor_scores, positives, negatives)
        ctx.attention, ctx.of_attention, ctx.longest, ctx.options = attention, of_attention, longest, options
        return loss, scores

    @staticmethod
    @first_order("matching_loss")
    def backward(
        ctx: Any, saved: tuple[Any, ...], grad_loss: Tensor | None, grad_scores: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gradient = grad_scores
        if grad_loss is not None:
            gradient = _gradient_of_loss(ctx, saved[4:], grad_loss)
            gradient = gradient if grad_scores is None else gradient + grad_scores
        if gradient is None:
            return (None,) * 10
        grad_queries, grad_contexts = _gradients_of_sides(ctx, saved[:4], gradient)
        return grad_queries, None, grad_contexts, *(None,) * 7


def _gradients_of_sides(ctx: Any, operands: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of queries and contexts for that of the scores; None if a side needs none."""
    queries, contexts = operands[:2], operands[2:]
    of_queries, of_contexts = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
    scorings, precision = ctx.of_attention
    backward = torch.ops.itm_fast.cross_attention_scores_backward
    if ctx.attention == "mean":
        gradient = gradient / 2
    own = gradient if ctx.attention == "i2t" else gradient.t()
    found = backward(own, *queries, *contexts, *scorings[0], precision, of_queries, of_contexts, *ctx.longest)[:2]
    if ctx.attention in OF_BOTH:
        turned = of_contexts, of_queries, *reversed(ctx.longest)
        others = backward(gradient, *contexts, *queries, *scorings[1], precision, *turned)[:2]
        wanted = zip((of_queries, of_contexts), found, reversed(others), strict=True)
        found = tuple(one + other if is_wanted else None for is_wanted, one, other in wanted)
    return found[0] if of_queries else None, found[1] if of_contexts else None


def _gradient_of_loss(ctx: Any, saved: Sequence[Any], grad_loss: Tensor) -> Tensor:
    """Return the gradient that the scores receive from the loss."""
    scores, anchor_scores, positives, negatives = saved
    operators, options = torch.ops.itm_fast, ctx.options
    if anchor_scores is None:
        inputs, names = (scores, positives, None), _OF_TRIPLET
        with_gradient, backward = operators.triplet_loss_with_gradient, operators.triplet_loss_backward
    else:
        inputs, names = (scores, anchor_scores, positives), _OF_BOOSTING
        with_gradient, backward = operators.boosting_loss_with_gradient, operators.boosting_loss_backward
    of_loss = [options[name] for name in names]
    gradients = taken_gradients(ctx, grad_loss, lambda: with_gradient(*inputs, *of_loss)[2:])
    if gradients is None:
        gradients = backward(grad_loss, *inputs, negatives, *of_loss)
    gradient: Tensor = gradients if isinstance(gradients, Tensor) else gradients[0]
    return gradient


_OF_TRIPLET = ("margin", "mining", "epsilon", "selective_divisor", "halve", "directions", "reduction")
_OF_BOOSTING = ("strategy", "mining", "margin", "alpha", "soft", "directions", "reduction")


@register_fake("matching_loss")
def _matching_loss_fake(
    queries: Tensor,
    query_offsets: Tensor,
    _contexts: Tensor,
    context_offsets: Tensor,
    anchor_scores: Tensor | None,
    _positives: Tensor | None,
    attention: str,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    named = dict(zip(_UNUSED, options[-len(_UNUSED) :], strict=True))
    shape = (query_offsets.shape[0] - 1, context_offsets.shape[0] - 1)
    scores = queries.new_empty(shape, dtype=_attention.score_dtype(queries))
    if anchor_scores is None:
        of_loss = [named[name] for name in _OF_TRIPLET]
        loss, negatives, gradient, _ = _triplet._triplet_loss_with_gradient_fake(scores, None, None, *of_loss)
    else:
        of_loss = [named[name] for name in _OF_BOOSTING]
        loss, negatives, gradient = _boosting._boosting_loss_with_gradient_fake(scores, scores, None, *of_loss)
    return loss, scores, negatives, gradient
