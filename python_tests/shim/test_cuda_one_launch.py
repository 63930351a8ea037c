"""Loss and gradient in one launch, in the CPU shim with all blocks resident at once (docs/internals/shim.md).

The kernels are compiled for the CPU and simulated; no GPU is involved. Other tests compare the kernels of two launches
with the reference; here both forms must agree bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from python_tests.helpers.boosting import random_pair
from python_tests.helpers.shim import (
    DIRECTIONS,
    IN_ORDER,
    MINING,
    STRATEGIES,
    BoostingKernels,
    KernelError,
    OneLaunchKernels,
    ProductKernels,
    TripletKernels,
    call,
    compiled_driver,
)
from python_tests.helpers.shim_checks import array, check_one_launch, check_scaling, choose

pytestmark = pytest.mark.shim

sizes = st.sampled_from([1, 2, 7, 16, 17, 33, 65, 70])
few_values = [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0]
Kernels = tuple[OneLaunchKernels, TripletKernels, BoostingKernels, ProductKernels]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    libraries = [compiled_driver(name) for name in ("one_launch", "triplet", "boosting", "product")]
    return (
        OneLaunchKernels(libraries[0]),
        TripletKernels(libraries[1]),
        BoostingKernels(libraries[2]),
        ProductKernels(libraries[3]),
    )


def assert_same(actual: list[np.ndarray], right: list[np.ndarray | None]) -> None:
    expected = [part for part in right if part is not None]
    assert [part.tobytes() for part in actual] == [part.tobytes() for part in expected]


@settings(max_examples=60)
@given(st.data())
def test_triplet_loss_is_that_of_two_launches(kernels: Kernels, data: st.DataObject) -> None:
    size, seed = data.draw(sizes), data.draw(st.integers(0, 2**31))
    directions = data.draw(st.sampled_from(DIRECTIONS))
    separate = directions != "both" and data.draw(st.booleans())
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(seed)
    shape = (size, data.draw(st.sampled_from([0, 5, 67]))) if separate else (size, size)
    scores = (
        choose(few_values, shape, seed, dtype, 0.01)
        if data.draw(st.booleans())
        else torch.randn(shape, generator=generator, dtype=dtype)
    )
    options: dict[str, Any] = {
        "mining": data.draw(st.sampled_from(MINING)),
        "epsilon": data.draw(st.sampled_from([0.0, 0.5])),
        "directions": directions,
        "halve": data.draw(st.booleans()),
        "reduction": data.draw(st.sampled_from(["sum", "mean"])),
        "large": data.draw(st.booleans()),
    }
    mask = array(torch.rand(shape, generator=generator) < 0.3) if data.draw(st.booleans()) else None
    own = scores.new_full((shape[directions == "columns"],), 0.25).numpy() if separate else None
    loss, negatives = kernels[1].forward(scores.numpy(), mask, own, seed=seed, **options)
    gradients = kernels[1].backward(np.ones_like(loss), scores.numpy(), negatives, mask, own, seed=seed, **options)
    blocks = data.draw(st.integers(1, 5))
    actual = kernels[0].triplet(scores.numpy(), mask, own, seed=seed + 1, blocks=blocks, **options)
    # The gradients of a non-finite loss are not defined.
    count = None if np.isfinite(loss) else 2
    assert_same(actual[:count], [loss, negatives, *gradients][:count])


@settings(max_examples=40)
@given(st.data())
def test_boosting_loss_is_that_of_two_launches(kernels: Kernels, data: st.DataObject) -> None:
    size, seed = data.draw(sizes), data.draw(st.integers(0, 2**31))
    scores, anchor = (
        part.numpy() for part in random_pair(size, data.draw(st.sampled_from([torch.float32, torch.float64])), seed)
    )
    mask = array(random_pair(size, seed=seed + 1)[0] > 0.4) if data.draw(st.booleans()) else None
    options: dict[str, Any] = {
        "strategy": data.draw(st.sampled_from(STRATEGIES)),
        "mining": data.draw(st.sampled_from(["all", "hardest"])),
        "soft": data.draw(st.booleans()),
        "directions": data.draw(st.sampled_from(DIRECTIONS)),
        "reduction": data.draw(st.sampled_from(["sum", "mean"])),
    }
    loss, negatives = kernels[2].forward(scores, anchor, mask, seed=seed, **options)
    gradient = kernels[2].backward(np.ones_like(loss), scores, anchor, negatives, mask, seed=seed, **options)
    blocks = data.draw(st.integers(1, 5))
    actual = kernels[0].boosting(scores, anchor, mask, seed=seed + 1, blocks=blocks, **options)
    assert_same(actual, [loss, negatives, gradient])


@pytest.mark.parametrize("mining", MINING)
def test_one_launch_gives_the_numbers_of_the_reference(kernels: Kernels, mining: str) -> None:
    for size, blocks in ((1, 1), (32, 2), (64, 4)):
        scores, anchor = (choose(few_values, (size, size), size + i, torch.float32) for i in range(2))
        check_one_launch(kernels[0], scores, anchor, mining=mining, margin=0.25, blocks=blocks, seed=size)


def test_a_thousand_rows_in_large_tiles(kernels: Kernels) -> None:
    """Tiles as for more than 2^20 scores: 17 x 9 tiles, partial at both ends, with ties across all tiles."""
    scores, anchor = (choose(few_values, (1025, 1025), i, torch.float32) for i in range(2))
    check_one_launch(kernels[0], scores, anchor, mining="hardest", margin=0.25, blocks=3, large=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_gradient_is_multiplied_by_the_incoming_one(kernels: Kernels, dtype: type) -> None:
    check_scaling(kernels[0], dtype)


# Tests of the grid barrier in the shim


def grid(kernels: Kernels, rule: int, seed: int, blocks: int = 4) -> list[int]:
    out = np.zeros(blocks, np.int64)
    call(kernels[3].library.barriers_of_the_grid, rule, seed, blocks, out)
    return out.tolist()


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_after_a_barrier_of_the_grid_all_blocks_have_written(kernels: Kernels, blocks: int) -> None:
    for seed in (*range(4), IN_ORDER):
        # Every block sums what all blocks wrote, twice: first 1 to n, then those sums.
        total = blocks * (blocks + 1) // 2
        assert grid(kernels, 0, seed, blocks) == [total * blocks] * blocks


def test_without_one_the_numbers_are_wrong(kernels: Kernels) -> None:
    assert any(grid(kernels, 1, seed) != [40] * 4 for seed in range(4))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (2, r"block \d, thread \d+: waits for a barrier of the grid that other blocks never come to$"),
        (3, r"block \d, thread \d+: waits for a barrier of the grid that other blocks never come to$"),
    ],
)
def test_a_barrier_that_not_all_blocks_come_to_is_reported(kernels: Kernels, rule: int, message: str) -> None:
    """Either one block leaves early, or blocks run one after another as in an ordinary launch."""
    for seed in (*range(4), IN_ORDER):
        with pytest.raises(KernelError, match=message):
            grid(kernels, rule, seed)
    assert grid(kernels, 0, 0) == [40] * 4
