"""The CUDA kernels of `boosting_loss` in the CPU shim (docs/internals/shim.md), against the reference.

The kernels are compiled for the CPU and simulated; no GPU is involved.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from python_tests.helpers.boosting import MINING, loop_boosting, random_pair
from python_tests.helpers.shim import (
    DIRECTIONS,
    REDUCTIONS,
    STRATEGIES,
    BoostingKernels,
    compiled_driver,
)
from python_tests.helpers.shim_checks import check_boosting, choose

pytestmark = pytest.mark.shim

sizes = st.sampled_from([1, 2, 3, 7, 15, 16, 17, 33, 64, 65, 70])
seeds = st.integers(0, 2**31)
few_values = [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0]


@pytest.fixture(scope="module")
def kernels() -> BoostingKernels:
    return BoostingKernels(compiled_driver("boosting"))


@settings(max_examples=80)
@given(st.data())
def test_fixed_margins_with_ties_masks_and_special_values(kernels: BoostingKernels, data: st.DataObject) -> None:
    """Sums of few-digit numbers are exact, so the results are equal bit for bit."""
    size, seed = data.draw(sizes), data.draw(seeds)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    rare = data.draw(st.sampled_from([0.0, 0.0, 0.02]))
    scores, anchor = (choose(few_values, (size, size), seed + i, dtype, rare) for i in range(2))
    options: dict[str, Any] = {
        "strategy": data.draw(st.sampled_from(STRATEGIES)),
        "mining": data.draw(st.sampled_from(MINING)),
        "margin": data.draw(st.sampled_from([0.0, 0.25, 0.5])),
        "alpha": data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        "directions": data.draw(st.sampled_from(DIRECTIONS)),
        "reduction": data.draw(st.sampled_from(REDUCTIONS)),
    }
    masked = data.draw(st.sampled_from([None, 0.1, 0.9, 1.0]))
    if masked is not None:
        options["positives"] = torch.rand(size, size, generator=torch.Generator().manual_seed(seed + 2)) < masked
    exact = options["reduction"] != "mean" or size & (size - 1) == 0
    check_boosting(kernels, scores, anchor, seed=seed, large=data.draw(st.booleans()), exact=exact, **options)


@settings(max_examples=50)
@given(sizes, st.sampled_from(STRATEGIES), st.sampled_from(MINING), st.sampled_from(DIRECTIONS), st.booleans(), seeds)
def test_soft_margins_of_any_numbers(
    kernels: BoostingKernels, size: int, strategy: str, mining: str, directions: str, double: bool, seed: int
) -> None:
    scores, anchor = random_pair(size, torch.float64 if double else torch.float32, seed)
    options: dict[str, Any] = {"strategy": strategy, "mining": mining, "directions": directions, "soft": True}
    options["positives"] = random_pair(size, seed=seed + 1)[0] > 0.5
    # Gradients may differ if rounding decides the active hinges.
    assume(loop_boosting(scores, anchor, **options).doubt > (1e-12 if double else 1e-6))
    check_boosting(kernels, scores, anchor, seed=seed, **options)
    check_boosting(kernels, scores, anchor, seed=seed, reduction="none", **options)


def test_empty_matrices(kernels: BoostingKernels) -> None:
    empty = np.zeros((0, 0), np.float32)
    for strategy in STRATEGIES:
        for mining in MINING:
            loss, negatives = kernels.forward(empty, empty, strategy=strategy, mining=mining)
            assert (loss.tolist(), negatives.size) == (0.0, 0)


@pytest.mark.parametrize("soft", [False, True])
def test_results_do_not_depend_on_the_order_of_blocks_and_threads(kernels: BoostingKernels, soft: bool) -> None:
    scores, anchor = (part.numpy() for part in random_pair(70, torch.float32))
    for mining in MINING:
        options = {"strategy": "both", "mining": mining, "soft": soft, "reduction": "mean"}
        outcomes = set()
        for seed in range(3):
            loss, negatives = kernels.forward(scores, anchor, seed=seed, **options)
            gradient = kernels.backward(np.ones((), np.float32), scores, anchor, negatives, seed=seed, **options)
            outcomes.add((loss.tobytes(), negatives.tobytes(), gradient.tobytes()))
        assert len(outcomes) == 1


@pytest.mark.parametrize("mining", MINING)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_incoming_gradient_that_is_not_finite_stays_with_its_anchor(
    kernels: BoostingKernels, mining: str, value: float
) -> None:
    scores, anchor = (part.numpy() for part in random_pair(20, torch.float32))
    options: dict[str, Any] = {"strategy": "both", "mining": mining, "reduction": "none"}
    _, negatives = kernels.forward(scores, anchor, **options)
    weights = np.ones((2, 20), np.float32)
    right = kernels.backward(weights, scores, anchor, negatives, **options)
    weights[0, 3] = value
    gradient = kernels.backward(weights, scores, anchor, negatives, **options)
    rest = np.arange(20) != 3
    assert np.array_equal(gradient[rest], right[rest])
    assert not np.isfinite(gradient[3]).all()
