"""The native backward of `regulated_scores` and `cross_attention_alignments` against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.functional import RegulatorParameters
from itm_fast.ops.cross_attention import NORMALIZATIONS
from itm_fast.ops.regulators import FOCAL_MODES
from python_tests.helpers.fragments import native_calls, random_fragments
from python_tests.helpers.regulators import SETTINGS, hidden_widths, random_parameters
from python_tests.helpers.tolerance import assert_as_accurate

pytestmark = pytest.mark.native

# Sets longer than a tile, empty sets, and widths that do not fill vectors, panels or blocks of the shared dimension.
QUERIES, CONTEXTS = [3, 1, 0, 170, 7, 40], [4, 0, 36, 1, 5]
DIM, WIDTH = 45, 19
# Every other pair has a gradient, so that slices begin and end within a run of query sets.
INCOMING = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
INCOMING[::2, 1::2] = INCOMING[1::2, ::2] = 0.0
INCOMING[3:5] = 0.5

Sides = tuple[Fragments, Fragments]


def operands(setting: str) -> tuple[Sides, RegulatorParameters]:
    """Return sets with one zero row on each side, and weights whose hidden widths differ between steps."""
    sides = random_fragments(QUERIES, DIM), random_fragments(CONTEXTS, DIM, seed=1)
    for side in sides:
        side.values[2] = 0.0
    parameters = random_parameters(setting, DIM, WIDTH)
    return sides, hidden_widths(parameters, 50, 9) if parameters.correspondences else parameters


def leaves_of(sides: Sides, parameters: RegulatorParameters, moved: Callable[[Tensor], Tensor]) -> list[Tensor]:
    tensors = [sides[0].values, sides[1].values, *parameters.tensors()]
    return [moved(tensor).detach().clone().requires_grad_() for tensor in tensors]


def gradients_of_scores(
    function: Callable[..., Tensor],
    sides: Sides,
    parameters: RegulatorParameters,
    moved: Callable[[Tensor], Tensor] = torch.Tensor.double,
    incoming: Tensor = INCOMING,
    **options: Any,
) -> list[Tensor]:
    leaves = leaves_of(sides, parameters, moved)
    given = [side.with_values(leaf) for side, leaf in zip(sides, leaves, strict=False)]
    scores = function(*given, parameters.with_tensors(leaves[2:]), **options)
    return list(torch.autograd.grad(scores, leaves, incoming.to(scores.dtype)))


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_of_scores(setting: str) -> None:
    """float64 equals the reference, float32 is as accurate as plain PyTorch. Only pairs with a gradient count."""
    sides, parameters = operands(setting)
    options: dict[str, Any] = {"temperature": 5.0, "focal": FOCAL_MODES[len(setting) % 3]}
    if parameters.aggregations:
        options |= {"dropout": 0.3, "seed": 2**62 + 7}
    exact = gradients_of_scores(reference.regulated_scores, sides, parameters, **options)
    with native_calls() as calls:
        found = gradients_of_scores(F_itm.regulated_scores, sides, parameters, **options)
    assert [name for name, _ in calls] == ["regulated_scores", "regulated_scores_backward"]
    present = [torch.tensor(lengths) > 0 for lengths in (QUERIES, CONTEXTS)]
    needed = (INCOMING != 0) & present[0][:, None] & present[1]
    assert int(calls[1][1][1][3]) == int(needed.sum())
    names = ["queries", "contexts", *(name for name, _ in parameters.named_tensors())]
    for name, own, right in zip(names, found, exact, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    for own, side in zip(found, sides, strict=False):
        assert bool((own[(side.values == 0).all(dim=1)] == 0).all())

    def plain(moved: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return gradients_of_scores(reference.regulated_scores_packed, sides, parameters, moved, **options)

    single = [side.to(torch.float32) for side in sides]
    weights = parameters.to(torch.float32)
    own = gradients_of_scores(F_itm.regulated_scores, (single[0], single[1]), weights, torch.Tensor.float, **options)
    rounded = [side.to(torch.float64) for side in single]
    exact = gradients_of_scores(
        reference.regulated_scores, (rounded[0], rounded[1]), weights.to(torch.float64), **options
    )
    sides, parameters = (rounded[0], rounded[1]), weights.to(torch.float64)
    assert_as_accurate(own, [lambda moved: plain(lambda tensor: moved(tensor.float()))], exact, names=names)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(
    ("setting", "focal"), list(zip(("rar1", "rcar2", "rcar2, residuals"), FOCAL_MODES, strict=True))
)
def test_gradients_of_alignments(normalization: str, setting: str, focal: str | None) -> None:
    """Includes an empty context set, whose attended vector is zero, and pairs without a gradient."""
    sides, parameters = operands(setting)
    count, steps = len(parameters.alignments), len(parameters.correspondences)
    tensors = [tensor for group in (*parameters.alignments, *parameters.correspondences) for tensor in group]
    incoming = torch.randn(len(CONTEXTS), sum(QUERIES), WIDTH, generator=torch.Generator().manual_seed(3))
    incoming[0, : QUERIES[0]] = incoming[4] = 0.0
    results = []
    for function in (F_itm.cross_attention_alignments, reference.cross_attention_alignments):
        leaves = [tensor.clone().requires_grad_() for tensor in (sides[0].values, sides[1].values, *tensors)]
        weights = leaves[2:]
        groups = [weights[2 * count + 8 * step : 2 * count + 8 * (step + 1)] for step in range(steps)]
        with native_calls() as calls:
            alignments = function(
                sides[0].with_values(leaves[0]),
                sides[1].with_values(leaves[1]),
                weights[: 2 * count : 2],
                weights[1 : 2 * count : 2],
                temperature=6.0,
                normalization=normalization,
                focal=focal,
                correspondences=[type(parameters.correspondences[0])(*group) for group in groups],
                residual_correspondence=parameters.residual_correspondence,
            )
            results.append(torch.autograd.grad(alignments, leaves, incoming.double()))
        names = ["cross_attention_alignments", "cross_attention_alignments_backward"]
        assert [name for name, _ in calls] == (names if function is F_itm.cross_attention_alignments else [])
    for own, right in zip(*results, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("setting", ["rcar2", "rcr2, query", "rar2, learned"])
def test_the_number_of_threads_changes_no_bit(setting: str) -> None:
    sides, parameters = operands(setting)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(gradients_of_scores(F_itm.regulated_scores, sides, parameters, torch.Tensor.float))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(own, right) for own, right in zip(other, results[0], strict=True))


def test_numbers_that_are_not_finite_stay_in_their_pairs() -> None:
    sides, parameters = operands("rcar2")
    values = sides[0].values.clone()
    values[3] = float("nan")  # query set 1, between two sets with gradients
    incoming = torch.ones_like(INCOMING)
    incoming[1] = 0.0
    broken = sides[0].with_values(values), sides[1]
    found = gradients_of_scores(F_itm.regulated_scores, broken, parameters, incoming=incoming)
    right = gradients_of_scores(reference.regulated_scores, sides, parameters, incoming=incoming)
    for own, other in zip(found, right, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)
    incoming[0, 0] = float("nan")
    found = gradients_of_scores(F_itm.regulated_scores, sides, parameters, incoming=incoming)
    assert bool(found[0][:2].isnan().all())
    assert bool(found[0][4:].isfinite().all())
    assert bool(found[1][4:].isfinite().all())


def test_half_precision_and_frozen_tensors() -> None:
    """Gradients have the dtype of the inputs; tensors that need none get none."""
    sides, parameters = operands("rcar2")
    words = sides[0].to(torch.bfloat16)
    words.values.requires_grad_()
    regions = sides[1].to(torch.bfloat16)
    scores = F_itm.regulated_scores(words, regions, parameters.to(torch.float32))
    scores.backward(INCOMING.float())
    assert words.values.grad is not None
    assert words.values.grad.dtype == torch.bfloat16
    assert regions.values.grad is None
    exact = gradients_of_scores(
        reference.regulated_scores,
        (words.with_values(words.values.detach()).to(torch.float64), regions.to(torch.float64)),
        parameters.to(torch.float32).to(torch.float64),
    )
    error = (words.values.grad.double() - exact[0]).abs().max() / exact[0].abs().max()
    assert float(error) < 2**-7


def test_without_a_pair_all_gradients_are_zero() -> None:
    sides, parameters = operands("rcar2")
    found = gradients_of_scores(F_itm.regulated_scores, sides, parameters, incoming=torch.zeros_like(INCOMING))
    assert all(bool((gradient == 0).all()) for gradient in found)
    empty = random_fragments([0, 0], DIM)
    incoming = torch.ones(2, len(CONTEXTS))
    found = gradients_of_scores(F_itm.regulated_scores, (empty, sides[1]), parameters, incoming=incoming)
    assert all(bool((gradient == 0).all()) for gradient in found)
