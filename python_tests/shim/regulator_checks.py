"""Compare the CUDA kernels of the regulators in the shim with the reference.

Each check raises AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from itm_fast import Fragments, reference
from itm_fast.functional import RegulatorParameters
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.regulators import random_parameters
from python_tests.helpers.tolerance import assert_as_accurate, assert_close_to_exact
from python_tests.shim.shim_regulators import RegulatorKernels, Weights


def weights_of(parameters: RegulatorParameters) -> Weights:
    """Convert parameters to the float32 arguments of the driver."""
    steps = [len(group) for group in (parameters.alignments, parameters.correspondences, parameters.aggregations)]
    rows = [tensor.shape[0] for group in parameters.alignments for tensor in group[:1]]
    aggregated = [group.a.shape[0] for group in parameters.aggregations]
    of_score = [] if parameters.score is None else [parameters.score.u.shape[1]]
    setting = {
        **dict(zip(("alignments", "correspondences", "aggregations"), steps, strict=True)),
        "scored": parameters.score is not None,
        "learned_factors": parameters.initial_factors is not None,
        "tanh_activation": parameters.activation == "tanh",
        "normalize_mean": parameters.normalize_mean,
        "normalize_attended": parameters.normalize_attended,
        "normalize_guidance": parameters.normalize_guidance,
        "interleaved": parameters.schedule == "interleaved" and steps[1] > 0 and steps[2] > 0,
        "sees_query": parameters.correspondence_input == "query",
        "residual_correspondence": parameters.residual_correspondence,
        "residual_aggregation": parameters.residual_aggregation,
    }
    return Weights(
        [tensor.detach().to(torch.float32).contiguous().numpy() for tensor in parameters.tensors()],
        next(iter([*rows, *aggregated, *of_score]), 0),
        [size for step in parameters.correspondences for size in (step.w1.shape[0], step.w3.shape[0])],
        setting,
    )


def result_of(
    kernels: RegulatorKernels,
    queries: Fragments,
    contexts: Fragments,
    parameters: RegulatorParameters,
    kernel: str = "float32",
    **options: Any,
) -> Tensor:
    """Run the kernels on the operands in float32; return the scores, or the alignments with `aligns`."""
    operands = [
        part
        for side in (queries, contexts)
        for part in (side.values.detach().to(torch.float32).contiguous().numpy(), side.offsets.long().numpy())
    ]
    options["dropout_seed"] = options.pop("seed", 0)
    options["seed"] = options.pop("order", 0)
    return torch.from_numpy(kernels.run(kernel, *operands, weights_of(parameters), **options))


def single(
    queries: Fragments, contexts: Fragments, parameters: RegulatorParameters
) -> tuple[Fragments, Fragments, RegulatorParameters]:
    return queries.to(torch.float32), contexts.to(torch.float32), parameters.to(torch.float32)


def double(
    queries: Fragments, contexts: Fragments, parameters: RegulatorParameters
) -> tuple[Fragments, Fragments, RegulatorParameters]:
    return queries.to(torch.float64), contexts.to(torch.float64), parameters.to(torch.float64)


def check_scores(
    kernels: RegulatorKernels,
    queries: Fragments,
    contexts: Fragments,
    parameters: RegulatorParameters,
    *,
    name: str = "scores",
    run: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Check that the error is at most twice the largest of many rounding draws of plain PyTorch."""
    given = single(queries, contexts, parameters)
    exact = reference.regulated_scores(*double(*given), **options)

    def plain(moved: Callable[[Tensor], Tensor]) -> list[Tensor]:
        sides = [part.with_values(moved(part.values)) for part in given[:2]]
        weights = given[2].with_tensors([moved(tensor) for tensor in given[2].tensors()])
        return [reference.regulated_scores_packed(*sides, weights, **options)]

    actual = result_of(kernels, *given, **options, **(run or {}))
    assert_as_accurate([actual], [plain], [exact], names=[name])


def check_alignments(
    kernels: RegulatorKernels,
    queries: Fragments,
    contexts: Fragments,
    parameters: RegulatorParameters,
    *,
    name: str = "alignments",
    **options: Any,
) -> None:
    """Check `cross_attention_alignments` in the same way, with the alignments of `parameters`."""
    given = single(queries, contexts, parameters)

    def aligned(function: Callable[..., Tensor], sides: list[Fragments], weights: RegulatorParameters) -> Tensor:
        groups = [[group.weight for group in weights.alignments], [group.bias for group in weights.alignments]]
        rest = {"residual_correspondence": weights.residual_correspondence, **options}
        return function(*sides, *groups, correspondences=weights.correspondences, **rest)

    wide = double(*given)
    exact = aligned(reference.cross_attention_alignments, list(wide[:2]), wide[2])

    def plain(moved: Callable[[Tensor], Tensor]) -> list[Tensor]:
        sides = [part.with_values(moved(part.values)) for part in given[:2]]
        weights = given[2].with_tensors([moved(tensor) for tensor in given[2].tensors()])
        return [aligned(reference.cross_attention_alignments_packed, sides, weights)]

    actual = result_of(kernels, *given[:2], chain_of(given[2]), aligns=True, **options)
    assert_as_accurate([actual], [plain], [exact], names=[name])


def check_low_parts(kernels: RegulatorKernels) -> None:
    """Check alignments in bfloat16 beside autocast where rounding the Gram matrix would change norms by 16 %.

    Half of the contexts are `u + w`, half `w - u`, with u and w orthogonal. The matrix has the numbers `1 + ww` and
    `ww - 1`, which bfloat16 rounds to 1 and -0.996, and the attended vector is w.
    """
    queries, parameters = random_fragments([35, 40], 260, seed=3), random_parameters("rar1", 260, 10)
    u, w = torch.linalg.qr(torch.randn(260, 2, generator=torch.Generator().manual_seed(5)))[0].T
    rows = torch.stack([u + 0.0028**0.5 * w, 0.0028**0.5 * w - u]).repeat(20, 1)
    given = single(queries, Fragments(rows, torch.tensor([0, 40])), parameters)

    def aligned(function: Callable[..., Tensor], operands: tuple[Fragments, Fragments, RegulatorParameters]) -> Tensor:
        (weight, bias), *_ = operands[2].alignments
        return function(*operands[:2], [weight], [bias], temperature=0.0)

    exact = aligned(reference.cross_attention_alignments, double(*given))
    with torch.autocast("cpu", torch.bfloat16):
        plain = aligned(reference.cross_attention_alignments_packed, given).float()
    actual = result_of(kernels, *given[:2], chain_of(given[2]), "bf16", aligns=True, temperature=0.0)
    assert_close_to_exact(actual, plain, exact, name="low parts")


def chain_of(parameters: RegulatorParameters) -> RegulatorParameters:
    """Return the parameters up to the last alignments, with an unused score, as the operator passes them."""
    weight = parameters.alignments[0].weight
    return RegulatorParameters(
        parameters.alignments,
        parameters.correspondences,
        score=(weight.new_zeros(1, weight.shape[0]), weight.new_zeros(1)),
        residual_correspondence=parameters.residual_correspondence,
    )
