"""Compare the backward kernels of the regulators in the shim with the reference gradients.

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
from python_tests.helpers.tolerance import assert_as_accurate
from python_tests.shim.regulator_checks import chain_of, double, single, weights_of
from python_tests.shim.shim_regulators import RegulatorBackwardKernels

Sides = tuple[Fragments, Fragments]
# Two tiles of queries for one context set; query set 2 and context set 1 are empty.
QUERIES, CONTEXTS = [3, 1, 0, 12, 9, 9], [4, 0, 17, 1]


def sparse_gradients(sides: Sides, parameters: RegulatorParameters, aligns: bool = False, seed: int = 0) -> Tensor:
    """Draw gradients of which about a third, by pairs of sets, are zero."""
    generator = torch.Generator().manual_seed(seed)
    queries, contexts = sides
    needed = torch.rand(len(queries), len(contexts), generator=generator) > 0.3
    if not aligns:
        return torch.where(needed, torch.randn(needed.shape, generator=generator), 0.0)
    width = parameters.alignments[0].weight.shape[0]
    gradients = torch.randn(len(contexts), len(queries.values), width, generator=generator)
    return torch.where(needed[queries.set_index()].t()[:, :, None], gradients, 0.0)


def gradients_of(
    kernels: RegulatorBackwardKernels,
    sides: Sides,
    parameters: RegulatorParameters,
    gradients: Tensor,
    *,
    aligns: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Run the kernels; return the gradients of queries, contexts and weights, each with the shape of its tensor."""
    operands = [part for side in sides for part in (side.values.detach().numpy(), side.offsets.long().numpy())]
    options["dropout_seed"] = options.pop("seed", 0)
    options["seed"] = options.pop("order", 0)
    weights = weights_of(parameters)
    found = kernels.run(gradients.contiguous().numpy(), *operands, weights, aligns=aligns, **options)
    of_weights = torch.from_numpy(found[2]).split([tensor.size for tensor in weights.tensors])
    parts = [part.view(tensor.shape) for part, tensor in zip(of_weights, weights.tensors, strict=True)]
    return [torch.from_numpy(found[0]), torch.from_numpy(found[1]), *parts]


def reference_gradients(
    function: Callable[..., Tensor],
    sides: Sides,
    parameters: RegulatorParameters,
    gradients: Tensor,
    moved: Callable[[Tensor], Tensor] = torch.Tensor.clone,
    **options: Any,
) -> list[Tensor]:
    tensors = [sides[0].values, sides[1].values, *parameters.tensors()]
    leaves = [moved(tensor.detach()).requires_grad_() for tensor in tensors]
    given = [side.with_values(leaf) for side, leaf in zip(sides, leaves, strict=False)]
    result = function(*given, parameters.with_tensors(leaves[2:]), **options)
    if not result.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(result, leaves, gradients.to(result.dtype), allow_unused=True)
    return [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(leaves, found, strict=True)]


def aligned(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `function`, a form of `cross_attention_alignments`, with the signature of `regulated_scores`."""

    def call(queries: Fragments, contexts: Fragments, weights: RegulatorParameters, **options: Any) -> Tensor:
        groups = [[group.weight for group in weights.alignments], [group.bias for group in weights.alignments]]
        rest = {"residual_correspondence": weights.residual_correspondence, **options}
        return function(queries, contexts, *groups, correspondences=weights.correspondences, **rest)

    return call


def check_gradients(
    kernels: RegulatorBackwardKernels,
    sides: Sides,
    parameters: RegulatorParameters,
    gradients: Tensor,
    *,
    aligns: bool = False,
    run: dict[str, Any] | None = None,
    **options: Any,
) -> list[Tensor]:
    """Check the number of pairs, and that each error is at most twice the largest of many rounding draws of PyTorch."""
    queries, contexts, weights = single(*sides, chain_of(parameters) if aligns else parameters)
    given = queries, contexts
    found = gradients_of(kernels, given, weights, gradients, aligns=aligns, **options, **(run or {}))
    if not aligns:
        present = (queries.lengths > 0)[:, None] & (contexts.lengths > 0)
        count = int((present & (gradients != 0)).sum())
        assert kernels.pairs == count, f"gradients of {kernels.pairs} pairs, expected {count}"
    exactly, plainly = reference.regulated_scores, reference.regulated_scores_packed
    if aligns:
        exactly = aligned(reference.cross_attention_alignments)
        plainly = aligned(reference.cross_attention_alignments_packed)
    wide = double(queries, contexts, weights)
    exact = reference_gradients(exactly, (wide[0], wide[1]), wide[2], gradients, **options)

    def plain(moved: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return reference_gradients(plainly, given, weights, gradients, lambda tensor: moved(tensor).clone(), **options)

    names = ["queries", "contexts", *(name for name, _ in weights.named_tensors())]
    assert_as_accurate(found, [plain], exact, names=[f"gradient of {name}" for name in names])
    for own, side in zip(found, given, strict=False):
        assert not bool(own[(side.values == 0).all(dim=1)].any()), "gradient of a zero row"
    return found


def check_all_gradients(kernels: RegulatorBackwardKernels) -> None:
    """Check cases that planted faults must fail.

    Chunks of one and of five tiles, many contexts, full tiles, bounds, zero rows, norms, long sets.
    """
    sides = random_fragments([3, 1, 0, 12, 9, 8], 70), random_fragments([4, 17], 70, seed=1)
    for side in sides:
        side.values[2] = 0.0
    parameters = random_parameters("rcar2", 70, 12)
    options = {"focal": "equal", "dropout": 0.4, "seed": 7, "temperature": 0.5}
    gradients = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
    gradients[0, 1] = 0.0
    check_gradients(kernels, sides, parameters, gradients, run={"room": 0, "blocks": 2}, **options)
    short = random_fragments([30, 30, 3, 30, 9], 20), random_fragments([7], 20, seed=1)
    for setting in ("rcr2, attended", "rcar2, guidance"):
        check_gradients(kernels, short, random_parameters(setting, 20, 10), gradients[:5, :1])
    many = random_fragments([5], 20), random_fragments([1] * 8, 20, seed=1)
    check_gradients(kernels, many, random_parameters("rar1", 20, 10), gradients[1:5].flatten()[None])
    sides = random_fragments([40, 36], 70), random_fragments([70], 70, seed=1)
    check_gradients(kernels, sides, parameters, gradients[4:, :1], run={"room": 0, "blocks": 2}, **options)
