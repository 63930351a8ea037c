"""The CUDA kernels of the losses and ranks in the CPU shim (docs/internals/shim.md), against the reference.

The kernels are compiled for the CPU and simulated; no GPU is involved.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from python_tests.helpers.shim import (
    DIRECTIONS,
    MINING,
    REDUCTIONS,
    SELECTIVE_DIVISORS,
    RetrievalKernels,
    TripletKernels,
    compiled_driver,
)
from python_tests.helpers.shim_checks import check_hardest, check_ranks, check_triplet, choose

pytestmark = pytest.mark.shim

# Sizes below, at and above whole tiles of 16 x 64, and several tiles.
sizes = st.sampled_from([1, 2, 3, 7, 15, 16, 17, 33, 63, 64, 65, 70, 130])
seeds = st.integers(0, 2**31)
few_values = [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0]


@pytest.fixture(scope="module")
def triplet() -> TripletKernels:
    return TripletKernels(compiled_driver("triplet"))


@pytest.fixture(scope="module")
def retrieval() -> RetrievalKernels:
    return RetrievalKernels(compiled_driver("retrieval"))


@settings(max_examples=120)
@given(st.data())
def test_triplet_loss_with_ties_masks_and_special_values(triplet: TripletKernels, data: st.DataObject) -> None:
    """Covers every option. Sums of few-digit numbers are exact, so the results are equal bit for bit."""
    n = data.draw(sizes)
    directions = data.draw(st.sampled_from(DIRECTIONS))
    separate = directions != "both" and data.draw(st.booleans())
    m = data.draw(st.sampled_from([0, 1, 5, 64, 67])) if separate else n
    seed = data.draw(seeds)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    rare = data.draw(st.sampled_from([0.0, 0.0, 0.02, 0.3]))
    scores = choose(few_values, (n, m), seed, dtype, rare)
    # "selective" and "mean" divide; results stay exact if the divisor is a power of two.
    mining = data.draw(st.sampled_from(MINING))
    options: dict[str, Any] = {
        "directions": directions,
        "mining": mining,
        "margin": data.draw(st.sampled_from([-0.25, 0.0, 0.25, 0.5])),
        "epsilon": data.draw(st.sampled_from([0.0, 0.25, 0.5])),
        "selective_divisor": data.draw(st.sampled_from(SELECTIVE_DIVISORS)),
        "halve": data.draw(st.booleans()),
        "reduction": data.draw(st.sampled_from(REDUCTIONS)),
    }
    masked = data.draw(st.sampled_from([None, 0.1, 0.9, 1.0]))
    if masked is not None:
        generator = torch.Generator().manual_seed(seed + 1)
        options["positives"] = torch.rand(n, m, generator=generator) < masked
    if separate:
        options["positive_scores"] = choose(few_values, (n if directions == "rows" else m,), seed + 2, dtype, rare)
    anchors, candidates = (n, m) if directions != "columns" else (m, n)
    divisor = max(candidates + separate - (options["selective_divisor"] == "negatives"), 1)
    exact = (mining != "selective" or is_power_of_two(divisor)) and (
        options["reduction"] != "mean" or is_power_of_two(max(anchors, 1))
    )
    check_triplet(triplet, scores, seed=seed, exact=exact, **options)


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


@settings(max_examples=40)
@given(sizes, st.sampled_from(MINING), seeds, st.sampled_from([torch.float32, torch.float64]))
def test_triplet_loss_of_any_numbers(
    triplet: TripletKernels, size: int, mining: str, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Scores away from the threshold of the hinge, where rounding would decide the active hinges.
    scores = (0.3 * torch.randn(size, size, generator=generator, dtype=torch.float64)).to(dtype)
    own = scores.diagonal()
    near = torch.stack([0.2 + scores - own[:, None], 0.2 + scores - own]).abs() < 1e-5
    scores = torch.where((near[0] | near[1]) & ~torch.eye(size, dtype=torch.bool), scores + 0.01, scores)
    mask = torch.rand(size, size, generator=generator) < 0.1
    check_triplet(triplet, scores, mining=mining, positives=mask, seed=seed, epsilon=0.2)


@pytest.mark.parametrize("mining", MINING)
def test_large_tiles_give_the_same(triplet: TripletKernels, mining: str) -> None:
    """Matrices of a million elements use tiles of 64 x 128."""
    for size, seed in ((1, 1), (64, 2), (150, 3)):
        scores = choose(few_values, (size, size), seed, torch.float32)
        mask = choose([0.0, 1.0, 1.0], (size, size), seed + 1, torch.float32) == 0.0
        options: dict[str, Any] = {"mining": mining, "margin": 0.25, "epsilon": 0.5}
        outcomes = []
        for large in (False, True):
            loss, negatives = triplet.forward(scores.numpy(), mask.numpy(), large=large, **options)
            ones = np.ones((), np.float32)
            gradient, _ = triplet.backward(ones, scores.numpy(), negatives, mask.numpy(), large=large, **options)
            outcomes.append((loss.tolist(), negatives.tolist(), gradient.tolist()))
        assert outcomes[0] == outcomes[1]
        check_triplet(triplet, scores, large=True, exact=mining != "selective", positives=mask, **options)


@settings(max_examples=40)
@given(sizes, seeds, st.sampled_from([0.0, 0.05, 0.5]), st.sampled_from([None, 0.2, 1.0]), st.booleans())
def test_hardest_negatives(
    triplet: TripletKernels, size: int, seed: int, rare: float, masked: float | None, large: bool
) -> None:
    scores = choose(few_values, (size, size), seed, torch.float32, rare)
    mask = None if masked is None else torch.rand(size, size, generator=torch.Generator().manual_seed(seed)) < masked
    check_hardest(triplet, scores, mask, large=large, seed=seed)


def test_empty_matrices(triplet: TripletKernels) -> None:
    empty = torch.zeros(0, 0)
    check_hardest(triplet, empty, None)
    for mining in MINING:
        for reduction in REDUCTIONS:
            loss, negatives = triplet.forward(empty.numpy(), mining=mining, reduction=reduction)
            assert loss.tolist() == ([[], []] if reduction == "none" else 0.0)
            assert negatives.size == 0


@pytest.mark.parametrize("mining", MINING)
def test_results_do_not_depend_on_the_order_of_blocks_and_threads(triplet: TripletKernels, mining: str) -> None:
    """Sums of random float32 numbers in another order would differ in the last digit."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(70, 70, generator=generator).numpy()
    options = {"mining": mining, "epsilon": 0.5, "reduction": "mean"}
    outcomes = set()
    for seed in range(4):
        loss, negatives = triplet.forward(scores, seed=seed, **options)
        gradient, _ = triplet.backward(np.ones((), np.float32), scores, negatives, seed=seed, **options)
        outcomes.add((loss.tobytes(), negatives.tobytes(), gradient.tobytes()))
    assert len(outcomes) == 1


@pytest.mark.parametrize("mining", MINING)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_incoming_gradient_that_is_not_finite_stays_with_its_anchor(
    triplet: TripletKernels, mining: str, value: float
) -> None:
    scores = torch.randn(20, 20, generator=torch.Generator().manual_seed(0)).numpy()
    options: dict[str, Any] = {"mining": mining, "epsilon": 0.5, "reduction": "none"}
    _, negatives = triplet.forward(scores, **options)
    weights = np.ones((2, 20), np.float32)
    right, _ = triplet.backward(weights, scores, negatives, **options)
    weights[0, 3] = value
    gradient, _ = triplet.backward(weights, scores, negatives, **options)
    changed = np.zeros((20, 20), bool)
    changed[3] = changed[3, 3] = True
    assert np.array_equal(gradient[~changed], right[~changed])
    assert not np.isfinite(gradient[3]).all()


@settings(max_examples=60)
@given(st.data())
def test_retrieval_ranks(retrieval: RetrievalKernels, data: st.DataObject) -> None:
    """Covers ties, NaN, infinities, images without captions, and any order of captions."""
    n_images, n_captions = data.draw(sizes), data.draw(sizes | st.just(0))
    seed = data.draw(seeds)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    values = data.draw(st.sampled_from([few_values, [0.0, -0.0]]))
    scores = choose(values, (n_images, n_captions), seed, dtype, data.draw(st.sampled_from([0.0, 0.05, 0.6])))
    owner = torch.randint(n_images, (n_captions,), generator=torch.Generator().manual_seed(seed))
    check_ranks(retrieval, scores, owner, large=data.draw(st.booleans()), seed=seed)


def test_an_image_out_of_range_belongs_to_nobody(retrieval: RetrievalKernels) -> None:
    """Nothing checks the values before a launch on a GPU; an invalid one must not cause an out-of-bounds access."""
    scores = np.array([[0.5, 0.9, 0.1], [0.7, 0.2, 0.3]], np.float32)
    images, captions = retrieval.ranks(scores, np.array([0, 7, -1]), "pessimistic")
    assert images.tolist() == [1, -1]  # Image 0 ranks caption 1 above its own caption; image 1 has no caption.
    assert captions[0] == 1


@settings(max_examples=200)
@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_scores_as_integers_keep_their_order(retrieval: RetrievalKernels, a: float, b: float) -> None:
    back = retrieval.library.order_and_back
    back.restype, back.argtypes = ctypes.c_double, [ctypes.c_double]
    rises = retrieval.library.order_rises
    rises.argtypes = [ctypes.c_double, ctypes.c_double]
    assert back(a) == a
    assert math.isnan(back(math.nan))
    assert bool(rises(a, b)) == (a < b or (a == b == 0.0 and math.copysign(1, a) < math.copysign(1, b)))
    assert rises(math.nan, a)
