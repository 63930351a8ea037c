"""Loss and gradient of the one-call form on the CPU equal those of two calls bit for bit.

Other tests compare the two-call form with loops.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.ops.triplet_loss import kernel_mining
from python_tests.helpers.boosting import MINING as BOOSTING_MINING
from python_tests.helpers.boosting import STRATEGIES, random_pair
from python_tests.helpers.shim_checks import assert_equal, choose
from python_tests.helpers.triplet_cases import MINING

pytestmark = pytest.mark.native

OPERATORS = torch.ops.itm_fast
# Several blocks of rows, partial tiles of columns, and partly filled vectors.
sizes = st.sampled_from([0, 1, 2, 7, 16, 17, 33, 65, 130, 1030])
directions_of = st.sampled_from(["both", "rows", "columns"])
few_values = [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0]


def drawn_scores(data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Draw random numbers, or few distinct values with NaN and infinities; contiguous or strided."""
    if data.draw(st.booleans()):
        scores = choose(few_values, shape, seed, dtype, data.draw(st.sampled_from([0.0, 0.002, 0.05])))
    else:
        scores = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return scores.unsqueeze(-1).repeat_interleave(2, dim=-1)[..., 0] if data.draw(st.booleans()) else scores


def drawn_mask(data: st.DataObject, shape: tuple[int, ...], seed: int) -> Tensor | None:
    share = data.draw(st.sampled_from([None, 0.1, 0.9, 1.0]))
    return None if share is None else torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def assert_same(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for position, (one, two) in enumerate(zip(found, right, strict=True)):
        assert_equal(one, two, f"result {position} of one call")


@settings(max_examples=150)
@given(st.data())
def test_triplet_loss_of_any_scores(data: st.DataObject) -> None:
    directions, seed = data.draw(directions_of), data.draw(st.integers(0, 2**31))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    separate = directions != "both" and data.draw(st.booleans())
    rows = data.draw(sizes)
    shape = (rows, data.draw(sizes) if separate else rows)
    own = drawn_scores(data, (shape[directions == "columns"],), dtype, seed + 1) if separate else None
    inputs = (drawn_scores(data, shape, dtype, seed), drawn_mask(data, shape, seed + 2), own)
    options = (
        data.draw(st.sampled_from([-0.25, 0.0, 0.2])),
        kernel_mining(data.draw(st.sampled_from(MINING))),
        data.draw(st.sampled_from([0.0, 0.5])),
        data.draw(st.sampled_from(["batch", "negatives"])),
        data.draw(st.booleans()),
        directions,
        data.draw(st.sampled_from(["sum", "mean"])),
    )
    loss, negatives = OPERATORS.triplet_loss(*inputs, *options)
    gradients = OPERATORS.triplet_loss_backward(torch.ones_like(loss), *inputs, negatives, *options)
    found = OPERATORS.triplet_loss_with_gradient(*inputs, *options)
    assert_same(found, (loss, negatives, *gradients))


@settings(max_examples=150)
@given(st.data())
def test_boosting_loss_of_any_scores(data: st.DataObject) -> None:
    size, seed = data.draw(sizes), data.draw(st.integers(0, 2**31))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    scores, anchor = (drawn_scores(data, (size, size), dtype, seed + i) for i in range(2))
    inputs = (scores, anchor, drawn_mask(data, (size, size), seed + 2))
    options = (
        data.draw(st.sampled_from(STRATEGIES)),
        data.draw(st.sampled_from(BOOSTING_MINING)),
        data.draw(st.sampled_from([0.0, 0.25])),
        data.draw(st.sampled_from([0.0, 0.3, 1.0])),
        data.draw(st.booleans()),
        data.draw(directions_of),
        data.draw(st.sampled_from(["sum", "mean"])),
    )
    loss, negatives = OPERATORS.boosting_loss(*inputs, *options)
    gradient = OPERATORS.boosting_loss_backward(torch.ones_like(loss), *inputs, negatives, *options)
    found = OPERATORS.boosting_loss_with_gradient(*inputs, *options)
    assert_same(found, (loss, negatives, gradient))


@pytest.mark.parametrize("mining", MINING)
def test_results_do_not_depend_on_the_number_of_threads(mining: str) -> None:
    """Threads share the rows, and the scaling of the gradient."""
    scores, anchor = random_pair(700, torch.float32)

    def numbers() -> list[Tensor]:
        found = []
        values: list[Any] = [lambda leaf: F_itm.triplet_loss(leaf, mining=mining, epsilon=0.1)]
        if mining in BOOSTING_MINING:
            values += [
                lambda leaf, strategy=strategy: F_itm.boosting_loss(
                    leaf, anchor, strategy=strategy, mining=mining, soft=True
                )
                for strategy in STRATEGIES
            ]
        for value in values:
            leaf = scores.clone().requires_grad_()
            loss = value(leaf)
            found += [loss.detach(), *torch.autograd.grad(0.3 * loss, leaf)]
        return found

    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(numbers())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("mining", BOOSTING_MINING)
def test_several_gradients_at_once(mining: str) -> None:
    """`torch.autograd.functional.jacobian(vectorize=True)` asks for them: one result row per incoming gradient."""
    scores, anchor = random_pair(9, torch.float32)
    incoming = torch.tensor([1.0, 0.5, -3.0])
    for loss in (
        lambda leaf, **options: F_itm.triplet_loss(leaf, mining=mining, **options),
        lambda leaf, **options: F_itm.boosting_loss(leaf, anchor, mining=mining, **options),
    ):
        leaf = scores.clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(leaf), leaf, incoming, is_grads_batched=True)
        for gradient, weight in zip(found, incoming, strict=True):
            (expected,) = torch.autograd.grad(weight * loss(leaf), leaf)
            torch.testing.assert_close(gradient, expected)
