"""The CUDA kernels of `maxsim_scores` in the CPU shim (docs/internals/shim.md), against the reference.

The kernels are compiled for the CPU and simulated; no GPU is involved. The tile of the tests has 16 context rows and 32
query rows.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import itm_fast.functional as F_itm
from itm_fast import Fragments
from python_tests.helpers.fragments import random_fragments, tied_fragments
from python_tests.helpers.shim import compiled_driver
from python_tests.shim.maxsim_checks import (
    KERNELS,
    check_maxsim,
    dtype_of,
    exact_results,
    operands_of,
    rows_of,
)
from python_tests.shim.shim_maxsim import DIRECTIONS, REDUCTIONS, TILE_CONTEXTS, TILE_QUERIES, MaxsimKernels

pytestmark = pytest.mark.shim

# Several tiles on both sides, empty sets, and sets of up to three tiles.
QUERY_LENGTHS, CONTEXT_LENGTHS = [3, 0, 5, 40, 1], [4, 6, 20, 0, 35, 7]
PAIRS = torch.tensor([[3, 4], [0, 0], [1, 2], [3, 4], [2, 3], [0, 5], [3, 1], [4, 2]])


@pytest.fixture(scope="module")
def kernels() -> MaxsimKernels:
    return MaxsimKernels(compiled_driver("maxsim"))


def sets(dim: int = 12, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Fragments, Fragments]:
    return (
        random_fragments(QUERY_LENGTHS, dim, dtype, seed=2 * seed),
        random_fragments(CONTEXT_LENGTHS, dim, dtype, seed=2 * seed + 1),
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(("reduction", "direction"), list(itertools.product(REDUCTIONS, DIRECTIONS)))
def test_every_option(kernels: MaxsimKernels, reduction: str, direction: str, listed: bool, kernel: str) -> None:
    """Sets of both sides are empty, share a tile, or are longer than a tile."""
    queries, contexts = sets(dtype=dtype_of(kernel))
    options = {"pairs": PAIRS if listed else None, "reduction": reduction, "direction": direction}
    check_maxsim(kernels, queries, contexts, kernel, **options)
    assert max(QUERY_LENGTHS) > TILE_QUERIES
    assert max(CONTEXT_LENGTHS) > 2 * TILE_CONTEXTS


@pytest.mark.parametrize("dim", [1, 37, 300])
@pytest.mark.parametrize("kernel", KERNELS)
def test_widths_and_precisions(kernels: MaxsimKernels, dim: int, kernel: str) -> None:
    """Widths reach from one element to more than a warp gathers; 37 is not aligned."""
    queries, contexts = sets(dim, dtype_of(kernel))
    check_maxsim(kernels, queries, contexts, kernel, pairs=PAIRS, direction="both", reduction="mean")


def test_precision_high_has_two_parts(kernels: MaxsimKernels) -> None:
    """Its errors are larger than those of three parts, and smaller than those of bfloat16 rows."""
    queries, contexts = sets(300)
    exact = exact_results(queries, contexts, torch.ones(5, 6))[0]
    highest, high, medium = (
        float((rows_of(kernels.scores(*operands_of(*sides), kernel=kernel)) - exact).abs().max())
        for kernel, sides in (
            ("float32", (queries, contexts)),
            ("float32_as_bf16x3", (queries, contexts)),
            ("bf16", (queries.to(torch.bfloat16), contexts.to(torch.bfloat16))),
        )
    )
    assert 4 * highest < high < medium / 64


def test_more_sets_than_a_tile_holds_or_a_warp_compares(kernels: MaxsimKernels) -> None:
    queries, contexts = random_fragments([1] * 35, 8, torch.float32), random_fragments([0, 1] * 20, 8, torch.float32, 1)
    check_maxsim(kernels, queries, contexts, direction="both")
    drawn = torch.randint(35, (70, 2), generator=torch.Generator().manual_seed(0))
    check_maxsim(kernels, queries, contexts, pairs=drawn, direction="both")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ties_take_the_first_row(kernels: MaxsimKernels, direction: str, kernel: str) -> None:
    """Few distinct products, which are exact: gradients equal those of the first maxima exactly."""
    queries, contexts = (
        tied_fragments(lengths, 2, dtype_of(kernel), seed=seed)
        for seed, lengths in enumerate((QUERY_LENGTHS, CONTEXT_LENGTHS))
    )
    incoming = torch.arange(30.0).reshape(5, 6)
    right = exact_results(queries, contexts, incoming, direction=direction)
    found = kernels.gradients(incoming.numpy(), *operands_of(queries, contexts), kernel=kernel, direction=direction)
    for actual, expected in zip(found, right[1:], strict=True):
        assert torch.equal(rows_of(actual, kernel), expected.to(dtype_of(kernel)).double())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_reach_their_pairs_alone(kernels: MaxsimKernels, value: float, kernel: str) -> None:
    """Products of 16-bit rows keep infinities; float32 is split into parts, which are NaN."""
    queries, contexts = sets(dtype=dtype_of(kernel))
    queries.values.abs_()
    contexts.values[50] = value
    right = exact_results(queries, contexts, torch.ones(5, 6), F_itm.maxsim_scores, direction="both")
    operands = operands_of(queries, contexts)
    found = [kernels.scores(*operands, kernel=kernel, direction="both")]
    found += kernels.gradients(np.ones((5, 6), np.float32), *operands, kernel=kernel, direction="both")
    for actual, expected in zip(found, right, strict=True):
        rows, finite = rows_of(actual, kernel), expected.isfinite()
        assert torch.equal(rows.isfinite(), finite)
        assert torch.allclose(rows[finite], expected[finite], rtol=2**-7, atol=1e-5)
    if kernel in ("bf16", "fp16"):
        assert torch.allclose(rows_of(found[0]), right[0], atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_listed_pairs_have_the_bits_of_all_pairs(kernels: MaxsimKernels, kernel: str) -> None:
    operands = operands_of(*sets(dtype=dtype_of(kernel)))
    for direction in DIRECTIONS:
        scores = kernels.scores(*operands, kernel=kernel, direction=direction)
        listed = kernels.scores(*operands, kernel=kernel, pairs=PAIRS.numpy(), direction=direction)
        assert listed.tobytes() == scores[PAIRS[:, 0], PAIRS[:, 1]].tobytes()


def test_results_do_not_depend_on_the_order_of_blocks_and_threads(kernels: MaxsimKernels) -> None:
    queries, contexts = sets()
    for pairs in (None, PAIRS):
        runs = [check_maxsim(kernels, queries, contexts, pairs=pairs, direction="both", seed=seed) for seed in range(3)]
        assert len({b"".join(part.tobytes() for part in found) for found in runs}) == 1


def test_the_launches(kernels: MaxsimKernels) -> None:
    operands = operands_of(*sets())
    for pairs, planning in ((None, 1), (PAIRS.numpy(), 0)):
        scores = kernels.scores(*operands, pairs=pairs)
        assert kernels.launches == planning + 1
        kernels.gradients(np.ones_like(scores), *operands, pairs=pairs)
        assert kernels.launches == planning + 2


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_workspace_of_listed_pairs_follows_their_number(kernels: MaxsimKernels, direction: str) -> None:
    """It has room for the longest set in each pair, and never more than for all pairs. The bits are the same."""
    operands, incoming = operands_of(*sets()), np.ones(8, np.float32)
    longest = (max(QUERY_LENGTHS), max(CONTEXT_LENGTHS))
    for count in (1, 2, 4, 8):
        given = {"pairs": PAIRS[:count].numpy(), "direction": direction}
        by_sets = kernels.gradients(incoming[:count], *operands, longest=(2**40, 2**40), **given)
        room_by_sets = kernels.workspace
        by_pairs = kernels.gradients(incoming[:count], *operands, longest=longest, **given)
        needed = 0
        for name, own, length, others in (
            ("contexts", QUERY_LENGTHS, longest[0], CONTEXT_LENGTHS),
            ("queries", CONTEXT_LENGTHS, longest[1], QUERY_LENGTHS),
        ):
            if direction != name:
                needed += min(count * length, len(others) * sum(own)) * 4
        assert needed <= kernels.workspace <= needed + 2 * 256
        assert kernels.workspace <= room_by_sets
        assert [part.tobytes() for part in by_pairs] == [part.tobytes() for part in by_sets]


def test_a_set_longer_than_stated_makes_its_gradients_nan(kernels: MaxsimKernels) -> None:
    queries, contexts = sets()
    given = {"pairs": np.array([[3, 1], [0, 0]]), "direction": "both", "longest": (39, 35)}
    found = kernels.gradients(np.ones(2, np.float32), *operands_of(queries, contexts), **given)
    for part, side, long in zip(found, (queries, contexts), (3, 1), strict=True):
        rows = np.arange(len(part))
        of_pair = (rows >= int(side.offsets[long])) & (rows < int(side.offsets[long + 1]))
        assert np.array_equal(np.isnan(part).all(axis=1), of_pair)
        assert np.isfinite(part[~of_pair]).all()


def test_a_frozen_side_leaves_the_other_as_it_is(kernels: MaxsimKernels) -> None:
    operands, incoming = operands_of(*sets()), np.ones((5, 6), np.float32)
    both = kernels.gradients(incoming, *operands, direction="both")
    of_queries = kernels.gradients(incoming, *operands, direction="both", for_contexts=False)
    of_contexts = kernels.gradients(incoming, *operands, direction="both", for_queries=False)
    assert (of_queries[1], of_contexts[0]) == (None, None)
    assert np.array_equal(of_queries[0], both[0])
    assert np.array_equal(of_contexts[1], both[1])


def test_pairs_out_of_range_are_clamped(kernels: MaxsimKernels) -> None:
    operands = operands_of(*sets())
    wrong, clamped = np.array([[-7, 2], [9, -1], [2, 2**40]]), np.array([[0, 2], [4, 0], [2, 5]])
    assert np.array_equal(kernels.scores(*operands, pairs=wrong), kernels.scores(*operands, pairs=clamped))
    incoming = np.ones(3, np.float32)
    results = [kernels.gradients(incoming, *operands, pairs=pairs, direction="both") for pairs in (wrong, clamped)]
    assert all(np.array_equal(one, other) for one, other in zip(*results, strict=True))


def test_pairs_with_a_side_without_sets_have_gradients_of_zero(kernels: MaxsimKernels) -> None:
    queries, contexts = sets()
    operands = operands_of(queries, Fragments(contexts.values[:0], torch.tensor([0])))
    pairs = np.array([[0, -1], [1, 0], [-1, -1]])
    of_queries, of_contexts = kernels.gradients(np.ones(3, np.float32), *operands, pairs=pairs, direction="both")
    assert not of_queries.any()
    assert of_contexts.shape == (0, contexts.values.shape[1])


def test_offsets_that_the_contract_forbids_lead_nowhere(kernels: MaxsimKernels) -> None:
    """Arrays have their exact size, so that a sanitizer sees an access outside; here the numbers stay finite."""
    queries, contexts = random_fragments([3, 5, 2], 12, torch.float32), random_fragments([4, 8, 1], 12, torch.float32)
    for offsets in ([0, 50, 2, 10], [-7, 3, 9, 10], [0, 9, 4, -1]):
        operands = operands_of(Fragments(queries.values, torch.tensor(offsets), check=False), contexts)
        assert np.isfinite(kernels.scores(*operands, direction="both")).all()
        found = kernels.gradients(np.ones((3, 3), np.float32), *operands, direction="both")
        assert all(np.isfinite(part).all() for part in found)
