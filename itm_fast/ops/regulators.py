"""`cross_attention_alignments` and `regulated_scores`: argument checks, native forward, autograd and fallback.

The backward recomputes the pairs with a non-zero gradient. Without native kernels, scores use the formulas of the
reference in the same way; alignments, and scores under `torch.compile`, use the packed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from itm_fast import reference
from itm_fast.fragments import Fragments, has_values
from itm_fast.ops.autograd import first_order, refuse_transforms
from itm_fast.ops.cross_attention import NORMALIZATIONS, check_fragments, check_same_space, longest_set, score_dtype
from itm_fast.ops.gradient_sparse import Listed, gradient_sparse_scores
from itm_fast.ops.library import register_fake, use_native
from itm_fast.ops.precision import autocast, compute_precision, without_autocast
from itm_fast.reference import validation
from itm_fast.reference.cross_attention import detach_zero_rows
from itm_fast.reference.philox import CounterDropout
from itm_fast.reference.regulator_parameters import CorrespondenceWeights, RegulatorParameters
from itm_fast.reference.regulators import alignment_parameters, counter_dropout
from itm_fast.reference.regulators_listed import regulated_scores_listed
from itm_fast.reference.regulators_packed import BLOCK_ELEMENTS, Places, regulated_scores_block

_SEEDS = 2**63
# Hard attention has no gradient, so the regulators could not learn from it.
FOCAL_MODES = (None, "equal", "prob")
# Elements of the widest tensor of a list of pairs in the backward, which holds about fifteen such tensors. The value is
# the fastest on a CPU. Other devices use larger lists, about 1 GB for all tensors, because each list costs several
# hundred launches: a step with 128 pairs and hardest negatives needs one list.
_LISTED_ELEMENTS, _LISTED_ON_DEVICES = 1 << 19, 32
# Limits of the CUDA kernels: steps of each kind; rows of query sets and context sets.
CUDA_STEPS = 8
CUDA_LONGEST = (512, 640)


def cross_attention_alignments(
    queries: Fragments,
    contexts: Fragments,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None,
    *,
    temperature: float,
    normalization: str,
    negative_slope: float,
    focal: str | None,
    correspondences: Sequence[CorrespondenceWeights],
    residual_correspondence: bool,
) -> Tensor:
    check_fragments(queries, contexts)
    validation.check_option("normalization", normalization, NORMALIZATIONS)
    _check_weights(weight, bias, correspondences)
    parameters = alignment_parameters(weight, bias, correspondences, residual_correspondence)
    beyond = beyond_kernels(queries.values.device.type, queries, contexts, parameters)
    queries, contexts = autocast(queries, contexts)
    check_same_space(queries, contexts)
    temperature, negative_slope = _check_attention(temperature, negative_slope, focal)
    check_parameters(parameters, queries)
    wide = score_dtype(queries.values)
    if use_native("cross_attention_alignments", queries.values, beyond):
        options = (
            len(parameters.correspondences),
            parameters.residual_correspondence,
            temperature,
            normalization,
            negative_slope,
            focal or "none",
            compute_precision(queries.values),
        )
        return _apply("cross_attention_alignments", queries.to(wide), contexts.to(wide), parameters.to(wide), *options)
    with without_autocast(queries.device.type):
        widened = parameters.to(wide)
        return reference.cross_attention_alignments_packed(
            queries.to(wide),
            contexts.to(wide),
            [group.weight for group in widened.alignments],
            [group.bias for group in widened.alignments],
            temperature=temperature,
            normalization=normalization,
            negative_slope=negative_slope,
            focal=focal,
            correspondences=widened.correspondences,
            residual_correspondence=residual_correspondence,
        )


def regulated_scores(
    queries: Fragments,
    contexts: Fragments,
    parameters: RegulatorParameters,
    *,
    temperature: float,
    negative_slope: float,
    focal: str | None,
    dropout: float,
    seed: int | Tensor | None,
) -> Tensor:
    check_fragments(queries, contexts)
    if not isinstance(parameters, RegulatorParameters):
        raise TypeError(f"parameters: expected RegulatorParameters, got {validation.describe(parameters)}")
    beyond = beyond_kernels(queries.values.device.type, queries, contexts, parameters)
    queries, contexts = autocast(queries, contexts)
    check_same_space(queries, contexts)
    temperature, negative_slope = _check_attention(temperature, negative_slope, focal)
    dropout = validation.finite_number("dropout", dropout, minimum=0.0)
    if dropout >= 1.0:
        raise ValueError(f"dropout: expected a probability below 1, got {dropout:g}")
    check_parameters(parameters, queries)
    seed = _seed(seed, dropout, queries.device)
    wide = score_dtype(queries.values)
    native = use_native("regulated_scores", queries.values, beyond)
    precision = compute_precision(queries.values)
    queries, contexts, parameters = queries.to(wide), contexts.to(wide), parameters.to(wide)
    options: dict[str, Any] = {"temperature": temperature, "negative_slope": negative_slope, "focal": focal}

    if native:
        return _native_scores(queries, contexts, parameters, dropout, seed, precision, **options)
    if not has_values(queries.values):
        with without_autocast(queries.device.type):
            return reference.regulated_scores_packed(
                queries, contexts, parameters, dropout=dropout, seed=seed, **options
            )
    queries, contexts = detach_zero_rows(queries), detach_zero_rows(contexts)
    mask = counter_dropout(dropout, seed, queries.device)
    return _gradient_sparse(queries, contexts, parameters, mask, options)


class _Regulators(torch.autograd.Function):
    """Save only operands and weights; the backward recomputes the pairs with a non-zero incoming gradient."""

    @staticmethod
    def forward(ctx: Any, operator: str, options: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        # torch.compile does not trace a call with other arguments beside these.
        ctx.save_for_backward(*tensors)
        ctx.operator, ctx.options = operator, options
        result: Tensor = getattr(torch.ops.itm_fast, operator)(*tensors[:4], list(tensors[4:]), *options)
        return result

    @staticmethod
    @first_order("the regulators' operator")
    def backward(ctx: Any, saved: tuple[Any, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        weights = saved[4:]
        backward = getattr(torch.ops.itm_fast, f"{ctx.operator}_backward")
        of_queries, of_contexts, of_weights, _ = backward(grad, *saved[:4], list(weights), *ctx.options)
        parts = of_weights.split([weight.numel() for weight in weights]) if weights else ()
        shaped = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
        return None, None, of_queries, None, of_contexts, None, *shaped


def _apply(
    operator: str, queries: Fragments, contexts: Fragments, parameters: RegulatorParameters, *options: Any
) -> Tensor:
    weights = _weights_of(operator, parameters)
    refuse_transforms(operator, queries.values, contexts.values, *weights)
    options = (*options, longest_set(queries), longest_set(contexts))
    result: Tensor = _Regulators.apply(
        operator, options, queries.values, queries.offsets, contexts.values, contexts.offsets, *weights
    )
    return result


def _weights_of(operator: str, parameters: RegulatorParameters) -> list[Tensor]:
    if operator == "regulated_scores":
        return parameters.tensors()
    return [tensor for group in (*parameters.alignments, *parameters.correspondences) for tensor in group]


def beyond_kernels(device: str, queries: Fragments, contexts: Fragments, parameters: RegulatorParameters) -> str | None:
    """Return why the kernels of a device do not support these operands, or None. The CPU kernels support all sizes.

    On a GPU this synchronizes if the lengths are unknown. Call it before autocast, so that the caller's own Fragments
    cache the lengths.
    """
    if device != "cuda":
        return None
    if torch.compiler.is_compiling() and not (queries.knows_max_length and contexts.knows_max_length):
        return "under torch.compile the CUDA kernels of the regulators need Fragments made with max_length"
    if queries.values.shape[1] == 0:
        return "the CUDA kernels of the regulators support rows of at least one component"
    for side, sets, longest in zip(("query", "context"), (queries, contexts), CUDA_LONGEST, strict=True):
        if sets.max_length > longest:
            return f"the CUDA kernels of the regulators support {side} sets of at most {longest} rows"
    steps = (parameters.alignments, parameters.correspondences, parameters.aggregations)
    if max(map(len, steps)) > CUDA_STEPS:
        return f"the CUDA kernels of the regulators support at most {CUDA_STEPS} steps"
    return None


def _native_scores(
    queries: Fragments,
    contexts: Fragments,
    parameters: RegulatorParameters,
    dropout: float,
    seed: int | Tensor | None,
    precision: str,
    *,
    temperature: float,
    negative_slope: float,
    focal: str | None,
) -> Tensor:
    if isinstance(seed, Tensor):
        seed = seed.clone()  # The backward draws the same masks, also if the caller changes the seed before it.
    elif seed is not None:
        seed = torch.full((1,), seed, dtype=torch.int64, device=queries.device)  # No synchronization.
    return _apply(
        "regulated_scores",
        queries,
        contexts,
        parameters,
        len(parameters.alignments),
        len(parameters.correspondences),
        len(parameters.aggregations),
        parameters.score is not None,
        parameters.initial_factors is not None,
        parameters.activation,
        parameters.normalize_mean,
        parameters.normalize_attended,
        parameters.normalize_guidance,
        parameters.schedule,
        parameters.residual_correspondence,
        parameters.residual_aggregation,
        parameters.correspondence_input,
        temperature,
        negative_slope,
        focal or "none",
        dropout,
        seed if dropout else None,
        precision,
    )


@register_fake("regulated_scores")
def _scores_fake(queries: Tensor, query_offsets: Tensor, contexts: Tensor, context_offsets: Tensor, *_: Any) -> Tensor:
    return queries.new_empty(query_offsets.shape[0] - 1, context_offsets.shape[0] - 1, dtype=score_dtype(queries))


@register_fake("cross_attention_alignments_backward")
@register_fake("regulated_scores_backward")
def _backward_fake(
    _grad: Tensor,
    queries: Tensor,
    _query_offsets: Tensor,
    contexts: Tensor,
    _context_offsets: Tensor,
    weights: list[Tensor],
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = score_dtype(queries)
    count = sum(weight.numel() for weight in weights)
    pairs = queries.new_empty(1, dtype=torch.int64)
    return (
        queries.new_empty(queries.shape, dtype=wide),
        contexts.new_empty(contexts.shape, dtype=wide),
        queries.new_empty(count, dtype=wide),
        pairs,
    )


@register_fake("cross_attention_alignments")
def _alignments_fake(
    queries: Tensor, query_offsets: Tensor, contexts: Tensor, context_offsets: Tensor, weights: list[Tensor], *_: Any
) -> Tensor:
    shape = (context_offsets.shape[0] - 1, queries.shape[0], weights[0].shape[0])
    return queries.new_empty(shape, dtype=score_dtype(queries))


def _gradient_sparse(
    queries: Fragments,
    contexts: Fragments,
    parameters: RegulatorParameters,
    dropout: CounterDropout | None,
    options: dict[str, Any],
) -> Tensor:
    """Score with the packed form; the backward recomputes the pairs with a non-zero gradient."""
    sets = queries.with_values(queries.values.detach()[:, :0])

    def score(
        weights: Sequence[Tensor], _: None, part: Fragments, others: Fragments, numbers: Tensor, contexts: Tensor
    ) -> Tensor:
        places = Places(sets.offsets[:-1][numbers], sets.row_index(numbers), contexts)
        with without_autocast(part.device.type):
            return regulated_scores_block(
                part, others, parameters.with_tensors(weights), places, dropout=dropout, **options
            )

    def of_list(
        weights: Sequence[Tensor], _: None, part: Fragments, others: Fragments, numbers: Tensor, contexts: Tensor
    ) -> Tensor:
        with without_autocast(part.device.type):
            return regulated_scores_listed(
                part,
                others,
                parameters.with_tensors(weights),
                sets.offsets[:-1][numbers],
                contexts,
                dropout=dropout,
                **options,
            )

    weights = parameters.tensors()
    width = max(queries.values.shape[1], contexts.max_length, *(max(tensor.shape) for tensor in weights), 1)
    row_elements = width * max(queries.max_length, 1)
    listed_elements = _LISTED_ELEMENTS * (1 if queries.device.type == "cpu" else _LISTED_ON_DEVICES)
    return gradient_sparse_scores(
        score,
        weights,
        queries,
        contexts,
        chunk_pairs=max(1, BLOCK_ELEMENTS // row_elements),
        listed=Listed(of_list, max(1, listed_elements // row_elements)),
    )


def check_parameters(parameters: RegulatorParameters, queries: Fragments) -> None:
    """Raise unless the weights match the width, dtype and device of the rows."""
    width = queries.values.shape[1]
    if parameters.embed_dim not in (None, width):
        raise ValueError(f"parameters: expected weights for rows of width {width}, got {parameters.embed_dim}")
    wide = score_dtype(queries.values)
    for name, tensor in parameters.named_tensors():
        if tensor.dtype not in (queries.dtype, wide):
            expected = f"{queries.dtype}" if wide == queries.dtype else f"{queries.dtype} or {wide}"
            raise TypeError(f"parameters.{name}: expected {expected} beside the queries, got {tensor.dtype}")
        validation.check_same_device(f"parameters.{name}", tensor, "queries", queries.values)


def _check_attention(temperature: float, negative_slope: float, focal: str | None) -> tuple[float, float]:
    validation.check_option("focal", focal, FOCAL_MODES)
    return (
        validation.finite_number("temperature", temperature),
        validation.finite_number("negative_slope", negative_slope),
    )


def _check_weights(
    weight: Tensor | Sequence[Tensor], bias: Tensor | Sequence[Tensor] | None, correspondences: Sequence[object]
) -> None:
    """Raise unless there is one weight, and one bias if biases are given, per attention."""
    if not isinstance(correspondences, list | tuple):
        raise TypeError(
            f"correspondences: expected a list, one entry per step, got {validation.describe(correspondences)}"
        )
    wanted = len(correspondences) + 1
    for name, given, shape in (("weight", weight, ("m", "d")), ("bias", bias, ("m",))):
        if given is None and name == "bias":
            continue
        parts = [given] if isinstance(given, Tensor) else given
        if not isinstance(parts, list | tuple):
            raise TypeError(f"{name}: expected a tensor, or a list of them, got {validation.describe(given)}")
        for index, part in enumerate(parts):
            validation.check_tensor(name if isinstance(given, Tensor) else f"{name}[{index}]", part, shape)
        if len(parts) != wanted:
            raise ValueError(f"{name}: expected {wanted} for {len(correspondences)} correspondences, got {len(parts)}")


def _seed(seed: int | Tensor | None, dropout: float, device: torch.device) -> int | Tensor | None:
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise TypeError(
                f"seed: expected an int, or an int64 tensor of one element, got {validation.describe(seed)}"
            )
        if seed.device != device:
            raise ValueError(f"seed: expected it on {device} like the queries, got {seed.device}")
        return seed
    if seed is None:
        return torch.randint(_SEEDS - 1, (1,), device=device) if dropout else None
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: expected an int, or an int64 tensor of one element, got {validation.describe(seed)}")
    if not -_SEEDS <= seed < _SEEDS:
        raise ValueError(f"seed: expected an int of 64 bits, got {validation.describe(seed)}")
    return seed
