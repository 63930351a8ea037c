"""`cross_attention_scores`: argument checks, autograd Function, fake kernels and fallback."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from itm_fast import reference
from itm_fast.fragments import Fragments
from itm_fast.ops.autograd import first_order, refuse_transforms
from itm_fast.ops.library import register_fake, use_native
from itm_fast.ops.precision import autocast, compute_precision, without_autocast
from itm_fast.ops.prepared_contexts import PreparedContexts
from itm_fast.reference import validation

NORMALIZATIONS = ("clipped_l2norm", "l2norm", "clipped_l1norm", "l1norm", "softmax", "clipped", "no_norm")
FOCAL_MODES = (None, "equal", "prob", "hard")
AGGREGATIONS = ("mean", "sum", "max", "logsumexp")
# Half of the room for the numbers of pairs in the backward on CUDA, as in its launcher.
CUDA_MOST_NUMBERS = 3_500_000
# Under torch.compile, lengths of the longest sets are rounded up to one of these. The first four are the rows of tiles.
CUDA_LENGTHS = (64, 80, 112, 128, 256, 384, 512, 640)


def check_fragments(queries: Fragments, contexts: Fragments) -> None:
    """Raise unless the argument is `Fragments` with a floating point dtype."""
    for name, fragments in (("queries", queries), ("contexts", contexts)):
        validation.check_fragments(name, fragments)
        validation.check_tensor(f"{name}.values", fragments.values, ("N", "d"))
        if validation.debugging():
            fragments.check_offsets()


def check_same_space(queries: Fragments, contexts: Fragments) -> None:
    """Raise if the dtypes, widths or devices of the rows differ."""
    if queries.dtype != contexts.dtype:
        raise TypeError(f"contexts: expected the dtype of the queries, {queries.dtype}, got {contexts.dtype}")
    if queries.values.shape[1] != contexts.values.shape[1]:
        raise ValueError(
            f"contexts: expected rows of width {queries.values.shape[1]} like the queries, "
            f"got {contexts.values.shape[1]}"
        )
    validation.check_same_device("contexts", contexts.values, "queries", queries.values)


def checked_operands(queries: Fragments, contexts: Fragments) -> tuple[Fragments, Fragments]:
    """Return the operands in the dtype of autocast; raise unless they can be compared."""
    check_fragments(queries, contexts)
    queries, contexts = autocast(queries, contexts)
    check_same_space(queries, contexts)
    return queries, contexts


def cuda_numbers(n_queries: int, n_contexts: int) -> int:
    """Return how many numbers the backward on CUDA keeps of a pair of sets of these lengths."""
    padded_queries, padded_contexts = (-(-n // 8) * 8 for n in (n_queries, n_contexts))
    return padded_queries * (padded_contexts // 2 * 13 + 5) + 4


def beyond_backward(device: str, queries: Fragments, contexts: Fragments) -> str | None:
    """Return why the backward on a device does not support these operands, or None.

    Lengths that are unknown are not looked at, which would synchronize with the GPU.
    """
    is_wanted = torch.is_grad_enabled() and (queries.values.requires_grad or contexts.values.requires_grad)
    if device != "cuda" or not (is_wanted and queries.knows_max_length and contexts.knows_max_length):
        return None
    if cuda_numbers(queries.max_length, contexts.max_length) <= CUDA_MOST_NUMBERS:
        return None
    return "the CUDA gradient of cross_attention_scores supports pairs of at most about 500,000 raw scores"


def longest_set(sets: Fragments) -> int:
    """Return the length of the longest set, for the workspace on CUDA; 0 where it is unknown or of no use.

    It never synchronizes. Under `torch.compile` it is rounded up, because each value is compiled separately.
    """
    if sets.device.type != "cuda" or not sets.knows_max_length:
        return 0
    return rounded_length(sets.max_length) if torch.compiler.is_compiling() else sets.max_length


def rounded_length(length: int) -> int:
    """Return the first of `CUDA_LENGTHS` that is not shorter, or the last one."""
    for rounded in CUDA_LENGTHS:
        if length <= rounded:
            return rounded
    return CUDA_LENGTHS[-1]


def check_options(
    temperature: float,
    normalization: str,
    negative_slope: float,
    focal: str | None,
    aggregation: str,
    logsumexp_temperature: float,
) -> tuple[float, float, float]:
    """Check the options and return the numbers as floats, in the order of the arguments."""
    validation.check_option("normalization", normalization, NORMALIZATIONS)
    validation.check_option("focal", focal, FOCAL_MODES)
    validation.check_option("aggregation", aggregation, AGGREGATIONS)
    return (
        validation.finite_number("temperature", temperature),
        validation.finite_number("negative_slope", negative_slope),
        validation.finite_number("logsumexp_temperature", logsumexp_temperature, non_zero=aggregation == "logsumexp"),
    )


def cross_attention_scores(
    queries: Fragments,
    contexts: Fragments | PreparedContexts,
    *,
    temperature: float,
    normalization: str,
    negative_slope: float,
    focal: str | None,
    aggregation: str,
    logsumexp_temperature: float,
) -> Tensor:
    grams, prepared_dtype = None, None
    if isinstance(contexts, PreparedContexts):
        if isinstance(queries, Fragments):
            contexts.check_usable(queries.values)
        grams, prepared_dtype, contexts = contexts.grams, contexts.dtype, contexts.fragments
    queries, contexts = checked_operands(queries, contexts)
    temperature, negative_slope, logsumexp_temperature = check_options(
        temperature, normalization, negative_slope, focal, aggregation, logsumexp_temperature
    )
    beyond = beyond_backward(queries.device.type, queries, contexts)
    if not use_native("cross_attention_scores", queries.values, beyond):
        with without_autocast(queries.device.type):
            wide = torch.promote_types(queries.dtype, torch.float32)
            return reference.cross_attention_scores_packed(
                queries.to(wide),
                contexts.to(wide),
                temperature=temperature,
                normalization=normalization,
                negative_slope=negative_slope,
                focal=focal,
                aggregation=aggregation,
                logsumexp_temperature=logsumexp_temperature,
            )
    refuse_transforms("cross_attention_scores", queries.values, contexts.values)
    operands = (queries.values, queries.offsets, contexts.values, contexts.offsets)
    options = (
        temperature,
        normalization,
        negative_slope,
        focal or "none",
        aggregation,
        logsumexp_temperature,
        compute_precision(queries.values),
    )
    # Autocast may have rounded the contexts after `prepare`; the Gram matrices are then invalid.
    if grams is not None and contexts.dtype == prepared_dtype:
        scores: Tensor = torch.ops.itm_fast.cross_attention_scores_prepared(*operands, grams, *options)
    else:
        scores = _CrossAttentionScores.apply(*operands, *options, longest_set(queries), longest_set(contexts))
    return scores


class _CrossAttentionScores(torch.autograd.Function):
    """Save only the operands; the backward recomputes the pairs with a non-zero incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        query_offsets: Tensor,
        contexts: Tensor,
        context_offsets: Tensor,
        *options: Any,
    ) -> Tensor:
        ctx.save_for_backward(queries, query_offsets, contexts, context_offsets)
        ctx.options = options
        scores: Tensor = torch.ops.itm_fast.cross_attention_scores(
            queries, query_offsets, contexts, context_offsets, *options
        )
        return scores

    @staticmethod
    @first_order("cross_attention_scores")
    def backward(ctx: Any, saved: tuple[Any, ...], grad_scores: Tensor) -> tuple[Tensor | None, ...]:
        for_queries, for_contexts = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        grad_queries, grad_contexts, _ = torch.ops.itm_fast.cross_attention_scores_backward(
            grad_scores, *saved, *ctx.options[:-2], for_queries, for_contexts, *ctx.options[-2:]
        )
        gradients = (grad_queries if for_queries else None, None, grad_contexts if for_contexts else None, None)
        return *gradients, *(None,) * len(ctx.options)


def score_dtype(queries: Tensor) -> torch.dtype:
    """Return the dtype of the scores: float64 for float64 queries, float32 otherwise."""
    return torch.float64 if queries.dtype == torch.float64 else torch.float32


@register_fake("cross_attention_scores_prepared")
@register_fake("cross_attention_scores")
def _scores_fake(queries: Tensor, query_offsets: Tensor, contexts: Tensor, context_offsets: Tensor, *_: Any) -> Tensor:
    shape = (query_offsets.shape[0] - 1, context_offsets.shape[0] - 1)
    return queries.new_empty(shape, dtype=score_dtype(queries))


@register_fake("cross_attention_grams")
def _grams_fake(contexts: Tensor, _context_offsets: Tensor) -> Tensor:
    return contexts.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=score_dtype(contexts))


@register_fake("cross_attention_scores_backward")
def _scores_backward_fake(
    _grad: Tensor,
    queries: Tensor,
    query_offsets: Tensor,
    contexts: Tensor,
    _context_offsets: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    for_queries, for_contexts = options[7:9]  # Behind them are the lengths, if they are known.
    grad_queries = queries.new_empty(queries.shape if for_queries else (0, queries.shape[1]))
    grad_contexts = contexts.new_empty(contexts.shape if for_contexts else (0, contexts.shape[1]))
    return grad_queries, grad_contexts, query_offsets.new_empty(1, dtype=torch.int64)
