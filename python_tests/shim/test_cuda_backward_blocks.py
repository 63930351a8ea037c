"""Blocks of scores in the backward CUDA kernels of cross_attention_scores, in the CPU shim, against the reference.

They take the place of lists if most pairs have a gradient. Here a share of 0 makes every gradient dense enough.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from itm_fast import Fragments
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.shim import IN_ORDER, compiled_driver
from python_tests.shim.backward_checks import (
    DTYPES,
    cancelling_sets,
    check_gradients,
    clear_of_thresholds,
    run,
    sparse_gradients,
)
from python_tests.shim.shim_attention import AGGREGATIONS, FOCAL_MODES, NORMALIZATIONS
from python_tests.shim.shim_backward import BackwardKernels

pytestmark = pytest.mark.shim

# Rooms for all tiles of these sets in one chunk, for two tiles in one, and for a tile by a tile.
QUERIES, CONTEXTS = [3, 1, 0, 9, 40, 12, 30], [36, 4, 0, 1, 36, 50]
ROOMS = {"one chunk": 150_000, "chunks of two tiles": 55_000, "chunks of a tile": 35_000}

check = functools.partial(check_gradients, dense_share=0.0)
run_blocks = functools.partial(run, dense_share=0.0)


@pytest.fixture(scope="module")
def kernels() -> BackwardKernels:
    return BackwardKernels(compiled_driver("cross_attention_backward"))


def sets(of_queries: list[int], of_contexts: list[int], dim: int = 12, seed: int = 0, **options: Any):
    """Draw queries and contexts."""
    options = {"dtype": torch.float32, **options}
    return (
        random_fragments(of_queries, dim, seed=2 * seed, **options),
        random_fragments(of_contexts, dim, seed=2 * seed + 1, **options),
    )


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_gradients_of_several_tiles(kernels: BackwardKernels, dtype: torch.dtype, room: str) -> None:
    """Rows are aligned or not; products have more than 128 rows, and sets lie across two of their tasks."""
    for seed, dim in enumerate((24, 141)):
        queries, contexts = sets(QUERIES, CONTEXTS, dim, dtype=dtype)
        gradients = sparse_gradients(len(QUERIES), len(CONTEXTS), (1.0, 0.8)[seed], seed)
        found = check(kernels, queries, contexts, gradients, room=ROOMS[room], seed=seed)
        assert found.blocks == "taken"


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("focal", FOCAL_MODES)
def test_every_option(kernels: BackwardKernels, normalization: str, focal: str | None) -> None:
    number = NORMALIZATIONS.index(normalization) + FOCAL_MODES.index(focal)
    queries, contexts = sets([3, 0, 25, 1], [14, 17, 2], seed=number)
    options = {"normalization": normalization, "focal": focal, "aggregation": AGGREGATIONS[number % 4]}
    gradients = sparse_gradients(4, 3, 1.0, number) * clear_of_thresholds(queries, contexts, **options)
    assert check(kernels, queries, contexts, gradients, seed=number, **options).blocks == "taken"


@pytest.mark.parametrize("room", ROOMS)
def test_results_do_not_depend_on_the_order_of_blocks_and_threads(kernels: BackwardKernels, room: str) -> None:
    """Nor on the number of blocks, which the seed draws; and a frozen side leaves the other as it is."""
    queries, contexts = sets(QUERIES, CONTEXTS, 40)
    gradients = sparse_gradients(len(QUERIES), len(CONTEXTS), 1.0, 0)
    both = run_blocks(kernels, queries, contexts, gradients, room=ROOMS[room])
    again = run_blocks(kernels, queries, contexts, gradients, room=ROOMS[room], seed=2)
    of_queries = run_blocks(kernels, queries, contexts, gradients, room=ROOMS[room], seed=1, for_contexts=False)
    of_contexts = run_blocks(kernels, queries, contexts, gradients, room=ROOMS[room], seed=1, for_queries=False)
    assert both.blocks == "taken"
    assert of_queries.contexts is None
    assert of_contexts.queries is None
    assert both.queries.tobytes() == again.queries.tobytes() == of_queries.queries.tobytes()
    assert both.contexts.tobytes() == again.contexts.tobytes() == of_contexts.contexts.tobytes()


def test_blocks_take_more_than_two_thirds_of_the_pairs(kernels: BackwardKernels) -> None:
    """The share is that of the launcher."""
    queries, contexts = sets([3, 20, 1, 14], [4, 12, 5, 1, 33])
    for n_pairs, blocks in ((20, "taken"), (14, "taken"), (13, "none"), (1, "none")):
        gradients = (torch.arange(20) < n_pairs).reshape(4, 5).float()
        found = check_gradients(kernels, queries, contexts, gradients, dense_share=0.65)
        assert (found.pairs, found.blocks, found.launches) == (n_pairs, blocks, 2)


def refused() -> dict[str, tuple[Fragments, Fragments]]:
    """Sets whose gradients lists must compute."""
    bad, broken, infinite = (sets([13, 25, 12], [14, 18, 11]) for _ in range(3))
    overlapping = sets([5, 5], [80])
    broken[0].values[1, 2] = math.nan
    infinite[1].values[1, 2] = math.inf
    return {
        "contexts longer than a tile": sets([30, 2, 1], [81, 2, 3], 8),
        "queries longer than a tile": sets([3, 65, 1], [24, 2, 3], 8),
        "vectors that cancel": cancelling_sets(5),
        "a word that is no number": broken,
        "an infinite region": infinite,
        "offsets that do not ascend": (Fragments(bad[0].values, torch.tensor([0, 29, 24, 50]), check=False), bad[1]),
        "more overlapping sets than Gram matrices": (
            overlapping[0],
            Fragments(overlapping[1].values, torch.tensor([0, 20, 40, 60, 80] * 8), check=False),
        ),
        "many sets of one context": sets([33] * 3, [1] * 64, 8),
    }


@pytest.mark.parametrize("name", refused())
def test_lists_take_what_blocks_refuse(kernels: BackwardKernels, name: str) -> None:
    """The results are those of lists, bit for bit."""
    queries, contexts = refused()[name]
    gradients = torch.ones(len(queries), len(contexts))
    for seed in (1, 2, IN_ORDER, IN_ORDER + 1):  # two and three blocks, together or as far apart as can be
        found = run_blocks(kernels, queries, contexts, gradients, seed=seed, temperature=0.01)
        lists = run(kernels, queries, contexts, gradients, seed=seed, temperature=0.01)
        assert found.blocks == "refused"
        assert found.queries.tobytes() == lists.queries.tobytes()
        assert found.contexts.tobytes() == lists.contexts.tobytes()


@pytest.mark.parametrize(("side", "longest"), [("contexts", (30, 81)), ("queries", (65, 24))])
def test_lists_take_sets_that_are_known_to_be_long(
    kernels: BackwardKernels, side: str, longest: tuple[int, int]
) -> None:
    """If the length is unknown or too short, blocks start and refuse. The results are the same, bit for bit."""
    operands = (*refused()[f"{side} longer than a tile"], torch.ones(3, 3))
    found = [run_blocks(kernels, *operands, longest=given) for given in (longest, (0, 0), (1, 1))]
    assert [one.blocks for one in found] == ["none", "refused", "refused"]
    assert len({(one.queries.tobytes(), one.contexts.tobytes()) for one in found}) == 1


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_rows_without_a_gradient(kernels: BackwardKernels, dtype: torch.dtype) -> None:
    """Rows of zeros have no direction; rows behind the last set have no set."""
    queries, contexts = sets([20, 12, 1], [24, 2, 1], 40, dtype=dtype)
    of_queries, of_contexts = [1, 32], [2, 24, 25]
    queries.values[of_queries] = 0.0
    contexts.values[of_contexts] = 0.0
    padded = [
        Fragments(torch.cat([side.values, torch.ones(3, 40, dtype=dtype)]), side.offsets, check=False)
        for side in (queries, contexts)
    ]
    room = 25_000  # The least, so that gradients of 16 bits are summed in float32.
    expected = check(kernels, queries, contexts, sparse_gradients(3, 3, 1.0, 0), room=room)
    found = run_blocks(kernels, *padded, sparse_gradients(3, 3, 1.0, 0), room=room)
    assert expected.blocks == "taken"
    assert found.blocks == "taken"
    for rows, own, zeros in (
        (found.queries, expected.queries, of_queries),
        (found.contexts, expected.contexts, of_contexts),
    ):
        assert not rows[len(own) :].any()
        assert not rows[zeros].any()
        assert (rows[: len(own)] == own).all()


@pytest.mark.parametrize(
    ("of_queries", "of_contexts"),
    [([2] * 66 + [0] * 34, [6, 5]), ([6, 5], [3] * 65 + [0] * 34), ([0] * 40 + [4], [0] * 40 + [5])],
    ids=["queries", "contexts", "both"],
)
def test_a_tile_may_have_empty_sets_only(
    kernels: BackwardKernels, of_queries: list[int], of_contexts: list[int]
) -> None:
    """A tile has at most 32 sets, so that of the last ones has no rows."""
    queries, contexts = sets(of_queries, of_contexts)
    found = check(kernels, queries, contexts, sparse_gradients(len(of_queries), len(of_contexts), 1.0, 0))
    assert found.blocks == "taken"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_incoming_gradient_that_is_not_finite_stays_with_its_pair(kernels: BackwardKernels, value: float) -> None:
    queries, contexts = sets([13, 21, 2], [14, 12, 13])
    gradients = torch.ones(3, 3)
    gradients[:, 1] = gradients[1] = 0.0
    right = run_blocks(kernels, queries, contexts, gradients)
    gradients[1, 1] = value
    found = run_blocks(kernels, queries, contexts, gradients)
    assert found.blocks == "taken"
    for actual, expected, side in ((found.queries, right.queries, queries), (found.contexts, right.contexts, contexts)):
        rows = (side.set_index() == 1).numpy()
        assert not np.isfinite(actual[rows]).any()
        assert np.array_equal(actual[~rows], expected[~rows])
