"""`domain_regularization`: argument checks, autograd Function, fake kernels and fallback."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from itm_fast import reference
from itm_fast.fragments import Fragments, has_values
from itm_fast.ops.autograd import first_order, is_differentiated, refuse_transforms
from itm_fast.ops.cross_attention import score_dtype
from itm_fast.ops.library import register_fake, use_native
from itm_fast.ops.precision import without_autocast
from itm_fast.ops.triplet_loss import upcast
from itm_fast.reference import validation

AGGREGATIONS = ("sum", "mean")
# Risks of a pair p with negatives q and r: R_p(f_p), R_p(f_q), R_q(f_p), R_p(f_r), R_r(f_p).
RISKS = 5


def check_options(margin: float, aggregation: str) -> float:
    """Check the options and return the margin as a float."""
    validation.check_option("aggregation", aggregation, AGGREGATIONS)
    return validation.finite_number("margin", margin)


def domain_regularization(
    regions: Fragments,
    words: Fragments,
    weights: Tensor,
    biases: Tensor,
    negative_captions: Tensor | None,
    negative_images: Tensor | None,
    margin: float,
    aggregation: str,
) -> tuple[Tensor, Tensor]:
    margin = check_options(margin, aggregation)
    _check_fragments(regions, words)
    _check_discriminators(regions, weights, biases)
    _check_negatives(regions, negative_captions, negative_images)
    if not use_native("domain_regularization", regions.values):
        with without_autocast(regions.device.type):
            return reference.domain_regularization_packed(
                regions,
                words,
                weights,
                biases,
                negative_captions,
                negative_images,
                margin=margin,
                aggregation=aggregation,
            )
    refuse_transforms("domain_regularization", regions.values, words.values, weights, biases)
    adversarial, regularization = _DomainRegularization.apply(
        regions.values,
        regions.offsets,
        words.values,
        words.offsets,
        upcast(weights),
        upcast(biases),
        *(None if part is None else part.to(torch.int64) for part in (negative_captions, negative_images)),
        margin,
        aggregation,
        is_differentiated(weights, biases),
    )
    return adversarial, regularization


def _check_fragments(regions: Fragments, words: Fragments) -> None:
    for name, fragments in (("regions", regions), ("words", words)):
        validation.check_fragments(name, fragments)
        validation.check_tensor(f"{name}.values", fragments.values, ("N", "D"))
        if validation.debugging():
            fragments.check_offsets()
    if words.dtype != regions.dtype:
        raise TypeError(f"words: expected the dtype of the regions, {regions.dtype}, got {words.dtype}")
    if words.offsets.shape != regions.offsets.shape:
        raise ValueError(f"words: expected {len(regions)} sets, one for each of regions, got {len(words)}")
    width = regions.values.shape[1]
    if words.values.shape[1] != width:
        raise ValueError(f"words: expected rows of width {width} like the regions, got {words.values.shape[1]}")
    validation.check_same_device("words", words.values, "regions", regions.values)


def _pairs_of(regions: Fragments) -> int:
    # With `len`, torch.compile would treat the number as a constant.
    return regions.offsets.shape[0] - 1


def _check_discriminators(regions: Fragments, weights: Tensor, biases: Tensor) -> None:
    exact = regions.dtype == torch.float64
    dtypes = tuple(dtype for dtype in validation.FLOATING if (dtype == torch.float64) == exact)
    validation.check_tensor("weights", weights, ("B", "D"), dtypes)
    validation.check_tensor("biases", biases, ("B",), (weights.dtype,))
    pairs, width = _pairs_of(regions), regions.values.shape[1]
    validation.check_shape("weights", weights, (pairs, width), "for the pairs of regions")
    validation.check_shape("biases", biases, (pairs,), "for the pairs of regions")
    for name, tensor in (("weights", weights), ("biases", biases)):
        validation.check_same_device(name, tensor, "regions", regions.values)


def _check_negatives(regions: Fragments, negative_captions: Tensor | None, negative_images: Tensor | None) -> None:
    given = {"negative_captions": negative_captions, "negative_images": negative_images}
    missing = [name for name, part in given.items() if part is None]
    if len(missing) == 1:
        other = next(name for name in given if name not in missing)
        raise ValueError(f"{missing[0]}: expected a tensor beside {other}, got None")
    if missing:
        return
    pairs = _pairs_of(regions)
    for name, part in given.items():
        validation.check_tensor(name, part, ("B",), validation.INTEGER)
        assert part is not None
        validation.check_shape(name, part, (pairs,), "for the pairs of regions")
        validation.check_same_device(name, part, "regions", regions.values)
        # Reading values would break the torch.compile graph and synchronize the GPU. Kernels ignore invalid pairs.
        if has_values(part) and (part.device.type == "cpu" or validation.debugging()):
            _check_pairs(name, part, pairs)


def _check_pairs(name: str, negatives: Tensor, pairs: int) -> None:
    outside = ((negatives < -1) | (negatives >= pairs)).nonzero()
    if len(outside):
        at = int(outside[0])
        raise ValueError(
            f"{name}: expected pairs from -1 (none) to {pairs - 1}, got {int(negatives[at])} for pair {at}"
        )


class _DomainRegularization(torch.autograd.Function):
    """Save the operands, the risks, and the contribution of each risk to the gradient of the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        regions: Tensor,
        region_offsets: Tensor,
        words: Tensor,
        word_offsets: Tensor,
        weights: Tensor,
        biases: Tensor,
        negative_captions: Tensor | None,
        negative_images: Tensor | None,
        margin: float,
        aggregation: str,
        for_weights: bool,
    ) -> tuple[Tensor, Tensor]:
        operands = (regions, region_offsets, words, word_offsets, weights, biases, negative_captions, negative_images)
        results: tuple[Tensor, ...] = torch.ops.itm_fast.domain_regularization(
            *operands, margin, aggregation, for_weights
        )
        adversarial, regularization, risks, sums = results
        ctx.save_for_backward(*operands, risks, sums)
        ctx.options = (margin, aggregation)
        return adversarial, regularization

    @staticmethod
    @first_order("domain_regularization")
    def backward(
        ctx: Any, saved: tuple[Any, ...], grad_adversarial: Tensor, grad_regularization: Tensor
    ) -> tuple[Tensor | None, ...]:
        for_regions, for_words = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        for_weights = ctx.needs_input_grad[4] or ctx.needs_input_grad[5]
        grad_regions, grad_words, grad_weights, grad_biases = torch.ops.itm_fast.domain_regularization_backward(
            grad_adversarial,
            grad_regularization,
            *saved,
            *ctx.options,
            for_regions,
            for_words,
            for_weights,
        )
        return (
            grad_regions if for_regions else None,
            None,
            grad_words if for_words else None,
            None,
            grad_weights if ctx.needs_input_grad[4] else None,
            grad_biases if ctx.needs_input_grad[5] else None,
            *(None,) * 5,
        )


@register_fake("domain_regularization")
def _domain_regularization_fake(
    regions: Tensor,
    region_offsets: Tensor,
    words: Tensor,
    word_offsets: Tensor,
    weights: Tensor,
    biases: Tensor,
    negative_captions: Tensor | None,
    negative_images: Tensor | None,
    margin: float,
    aggregation: str,
    for_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs, width = weights.shape
    kinds = 1 if negative_captions is None else RISKS
    dtype = score_dtype(regions)
    return (
        regions.new_empty(pairs, dtype=dtype),
        regions.new_empty(pairs, dtype=dtype),
        regions.new_empty((kinds, pairs), dtype=dtype),
        regions.new_empty((kinds if for_weights else 0, pairs, width + 1), dtype=dtype),
    )


@register_fake("domain_regularization_backward")
def _domain_regularization_backward_fake(
    grad_adversarial: Tensor,
    grad_regularization: Tensor,
    regions: Tensor,
    region_offsets: Tensor,
    words: Tensor,
    word_offsets: Tensor,
    weights: Tensor,
    biases: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    for_regions, for_words, for_weights = options[-3:]
    rows = [part.shape[0] if wanted else 0 for part, wanted in ((regions, for_regions), (words, for_words))]
    pairs = weights.shape[0] if for_weights else 0
    return (
        regions.new_empty((rows[0], regions.shape[1])),
        words.new_empty((rows[1], words.shape[1])),
        weights.new_empty((pairs, weights.shape[1])),
        biases.new_empty(pairs),
    )
