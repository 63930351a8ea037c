"""`maxsim_scores`: argument checks, autograd Function, fake kernels and fallback."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from itm_fast import reference
from itm_fast.fragments import Fragments, has_values
from itm_fast.ops.autograd import first_order, refuse_transforms
from itm_fast.ops.cross_attention import check_fragments, check_same_space, score_dtype
from itm_fast.ops.library import register_fake, use_native
from itm_fast.ops.precision import autocast, compute_precision, without_autocast
from itm_fast.reference import validation
from itm_fast.reference.maxsim import comparable_rows

SIMILARITIES = ("dot", "cosine")
REDUCTIONS = ("sum", "mean")
DIRECTIONS = ("queries", "contexts", "both")


def maxsim_scores(
    queries: Fragments, contexts: Fragments, *, pairs: Tensor | None, similarity: str, reduction: str, direction: str
) -> Tensor:
    check_fragments(queries, contexts)
    queries, contexts = autocast(queries, contexts)
    check_same_space(queries, contexts)
    validation.check_option("similarity", similarity, SIMILARITIES)
    validation.check_option("reduction", reduction, REDUCTIONS)
    validation.check_option("direction", direction, DIRECTIONS)
    if pairs is not None:
        _check_pairs(pairs, queries, contexts)
    with without_autocast(queries.device.type):
        wide = torch.promote_types(queries.dtype, torch.float32)
        if not use_native("maxsim_scores", queries.values):
            return reference.maxsim_scores_packed(
                queries.to(wide),
                contexts.to(wide),
                pairs=None if pairs is None else _within(pairs, queries, contexts),
                similarity=similarity,
                reduction=reduction,
                direction=direction,
            )
        refuse_transforms("maxsim_scores", queries.values, contexts.values)
        precision = compute_precision(queries.values)
        if similarity == "cosine":
            queries, contexts = queries.to(wide), contexts.to(wide)
        queries, contexts = comparable_rows(queries, similarity), comparable_rows(contexts, similarity)
    operands = (queries.values, queries.offsets, contexts.values, contexts.offsets, pairs)
    longest = _longest(queries), _longest(contexts)
    scores: Tensor = _MaxsimScores.apply(*operands, reduction, direction, precision, *longest)
    return scores


def _longest(sets: Fragments) -> int:
    """Return `max_length`, or 0 if it would synchronize with a GPU or make torch.compile compile again."""
    return sets.max_length if sets.knows_max_length and not torch.compiler.is_compiling() else 0


def _check_pairs(pairs: object, queries: Fragments, contexts: Fragments) -> None:
    validation.check_tensor("pairs", pairs, ("P", "2"), (torch.int64,))
    assert isinstance(pairs, Tensor)
    validation.check_shape("pairs", pairs, (pairs.shape[0], 2), "of query set and context set")
    validation.check_same_device("pairs", pairs, "queries", queries.values)
    # Reading values would break the torch.compile graph and synchronize the GPU. The CPU kernel checks them again.
    if not has_values(pairs) or not (pairs.device.type == "cpu" or validation.debugging()):
        return
    for column, (name, count) in enumerate((("query", len(queries)), ("context", len(contexts)))):
        outside = ((pairs[:, column] < 0) | (pairs[:, column] >= count)).nonzero()
        if len(outside):
            place = int(outside[0])
            raise ValueError(
                f"pairs: expected {name} sets from 0 to {count - 1}, got {int(pairs[place, column])} in pair {place}"
            )


def _within(pairs: Tensor, queries: Fragments, contexts: Fragments) -> Tensor:
    """Clamp the numbers of sets, which only a CPU checks."""
    last = pairs.new_tensor([len(queries) - 1, len(contexts) - 1])
    return torch.minimum(pairs.clamp(min=0), last)


class _MaxsimScores(torch.autograd.Function):
    """Save only the operands; the backward finds the maxima of the pairs with a non-zero incoming gradient again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.save_for_backward(*arguments[:5])
        ctx.options = arguments[5:]
        scores: Tensor = torch.ops.itm_fast.maxsim_scores(*arguments[:-2])
        return scores

    @staticmethod
    @first_order("maxsim_scores")
    def backward(ctx: Any, saved: tuple[Any, ...], grad_scores: Tensor) -> tuple[Tensor | None, ...]:
        for_queries, for_contexts = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        grad_queries, grad_contexts = torch.ops.itm_fast.maxsim_scores_backward(
            grad_scores, *saved, *ctx.options, for_queries, for_contexts
        )
        gradients = (grad_queries if for_queries else None, None, grad_contexts if for_contexts else None)
        return *gradients, *(None,) * 7


@register_fake("maxsim_scores")
def _scores_fake(
    queries: Tensor, query_offsets: Tensor, _contexts: Tensor, context_offsets: Tensor, pairs: Tensor | None, *_: Any
) -> Tensor:
    shape = (query_offsets.shape[0] - 1, context_offsets.shape[0] - 1) if pairs is None else (pairs.shape[0],)
    return queries.new_empty(shape, dtype=score_dtype(queries))


@register_fake("maxsim_scores_backward")
def _scores_backward_fake(
    _grad: Tensor, queries: Tensor, _query_offsets: Tensor, contexts: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    for_queries, for_contexts = options[-2:]
    return (
        queries.new_empty(queries.shape if for_queries else (0, queries.shape[1])),
        contexts.new_empty(contexts.shape if for_contexts else (0, contexts.shape[1])),
    )
