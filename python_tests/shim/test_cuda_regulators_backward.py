"""The backward CUDA kernels of `regulated_scores` and `cross_attention_alignments` in the CPU shim.

The kernels are compiled for the CPU and simulated; no GPU is involved (docs/internals/shim.md). The small tile of the
tests has 32 rows and 64 columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from itm_fast.functional import RegulatorParameters
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.regulators import SETTINGS, hidden_widths, random_parameters
from python_tests.helpers.shim import IN_ORDER, compiled_driver
from python_tests.shim.regulator_backward_checks import (
    CONTEXTS,
    QUERIES,
    Sides,
    check_all_gradients,
    check_gradients,
    gradients_of,
    sparse_gradients,
)
from python_tests.shim.regulator_checks import chain_of, single
from python_tests.shim.shim_attention import FOCAL_MODES, NORMALIZATIONS
from python_tests.shim.shim_regulators import ROOM, RegulatorBackwardKernels, random_weights

pytestmark = pytest.mark.shim

DIM, WIDTH = 70, 12  # two blocks of outputs, and two blocks of rows in the gradient of w2


@pytest.fixture(scope="module")
def kernels() -> RegulatorBackwardKernels:
    return RegulatorBackwardKernels(compiled_driver("regulators_backward"))


@pytest.fixture(scope="module")
def truncating() -> RegulatorBackwardKernels:
    """Tensor cores that cut sums off instead of rounding them."""
    return RegulatorBackwardKernels(compiled_driver("regulators_backward", "-DITM_FAST_SHIM_TRUNCATES"))


def operands(setting: str, dim: int = DIM, width: int = WIDTH) -> tuple[Sides, RegulatorParameters]:
    """Return sets with one zero row on each side, and weights whose hidden widths have no common divisor."""
    sides = random_fragments(QUERIES, dim), random_fragments(CONTEXTS, dim, seed=1)
    for side in sides:
        side.values[2] = 0.0
    parameters = random_parameters(setting, dim, width)
    return sides, hidden_widths(parameters, 21, 5) if parameters.correspondences else parameters


def long_sets(side: str, setting: str, dim: int = 20, width: int = 8) -> tuple[Sides, RegulatorParameters]:
    queries = random_fragments([5, 0, 12, 9] if side == "contexts" else [66, 0, 70, 70], dim)
    contexts = random_fragments([30] if side == "queries" else [140, 110], dim, seed=1)
    return (queries, contexts), random_parameters(setting, dim, width)


def bits_of(found: list[torch.Tensor]) -> bytes:
    return b"".join(part.numpy().tobytes() for part in found)


# Tests of numbers


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_of_scores_are_those_of_the_reference(kernels: RegulatorBackwardKernels, setting: str) -> None:
    sides, parameters = operands(setting)
    number = list(SETTINGS).index(setting)
    # Low temperatures reach their bound of zero.
    options: dict[str, Any] = {"temperature": (5.0, 0.3)[number % 2], "focal": FOCAL_MODES[number % 3]}
    if parameters.aggregations:
        options |= {"dropout": 0.3, "seed": 2**62 + 7}
    gradients = sparse_gradients(sides, parameters, seed=number)
    check_gradients(kernels, sides, parameters, gradients, run={"order": number}, **options)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_gradients_of_alignments_are_those_of_the_reference(
    kernels: RegulatorBackwardKernels, normalization: str
) -> None:
    """Includes the empty context set, whose attended vector is zero."""
    number = NORMALIZATIONS.index(normalization)
    sides, parameters = operands(("rar1", "rcar2", "rcar2, residuals")[number % 3])
    gradients = sparse_gradients(sides, parameters, aligns=True, seed=number)
    options: dict[str, Any] = {"temperature": 4.0, "focal": FOCAL_MODES[number % 3], "normalization": normalization}
    check_gradients(kernels, sides, parameters, gradients, aligns=True, **options)


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_of_long_sets(kernels: RegulatorBackwardKernels, setting: str) -> None:
    """Sets that take up to three products, beside an empty one."""
    number = list(SETTINGS).index(setting)
    sides, parameters = long_sets(("contexts", "queries", "both")[number % 3], setting)
    options: dict[str, Any] = {"temperature": (5.0, 0.3)[number % 2], "focal": FOCAL_MODES[number // 3 % 3]}
    if parameters.aggregations:
        options |= {"dropout": 0.3, "seed": number}
    gradients = sparse_gradients(sides, parameters, seed=number)
    check_gradients(kernels, sides, parameters, gradients, run={"room": 0}, **options)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_gradients_of_alignments_of_long_sets(kernels: RegulatorBackwardKernels, normalization: str) -> None:
    number = NORMALIZATIONS.index(normalization)
    sides, parameters = long_sets("both", "rcar2")
    gradients = sparse_gradients(sides, parameters, aligns=True, seed=number)
    options: dict[str, Any] = {"temperature": 4.0, "focal": FOCAL_MODES[number % 3], "normalization": normalization}
    check_gradients(kernels, sides, parameters, gradients, aligns=True, **options)


def test_gradients_with_truncated_sums(truncating: RegulatorBackwardKernels) -> None:
    """Of short sets, and of sets of several products."""
    check_all_gradients(truncating)
    sides, parameters = long_sets("both", "rcar2")
    check_gradients(truncating, sides, parameters, sparse_gradients(sides, parameters))


@pytest.mark.parametrize(("n_queries", "n_contexts"), [(3, 640), (512, 3)])
def test_gradients_of_the_longest_sets(kernels: RegulatorBackwardKernels, n_queries: int, n_contexts: int) -> None:
    sides = random_fragments([n_queries], 12), random_fragments([n_contexts], 12, seed=1)
    parameters = random_parameters("rcar2", 12, 10)
    check_gradients(kernels, sides, parameters, torch.ones(1, 1), run={"large": True, "room": 0})


def test_the_tile_of_the_launchers(kernels: RegulatorBackwardKernels) -> None:
    """Sets that fill the tile, and rows wider than a block of sums."""
    sides = random_fragments([110, 4], 260), random_fragments([125, 3], 260, seed=1)
    parameters = random_parameters("rcar2", 260, 8)
    gradients = torch.tensor([[0.5, 0.0], [0.0, -1.0]])
    check_gradients(kernels, sides, parameters, gradients, run={"large": True}, temperature=4.0)


lengths = st.sampled_from([0, 1, 1, 2, 3, 5, 9, 20])


@settings(max_examples=15)
@given(st.data())
def test_gradients_of_ragged_sets(kernels: RegulatorBackwardKernels, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**31))
    sides = (
        random_fragments(data.draw(st.lists(lengths, min_size=1, max_size=5)), 11, seed=seed),
        random_fragments(data.draw(st.lists(lengths, min_size=1, max_size=4)), 11, seed=seed + 1),
    )
    parameters = random_parameters(data.draw(st.sampled_from(list(SETTINGS))), 11, 6, seed=seed)
    run = {
        "room": data.draw(st.sampled_from([0, ROOM])),
        "blocks": data.draw(st.integers(1, 4)),
        "wide_offsets": data.draw(st.booleans()),
        "order": seed,
    }
    dropout = {"dropout": 0.3, "seed": seed} if parameters.aggregations else {}
    check_gradients(kernels, sides, parameters, sparse_gradients(sides, parameters, seed=seed), run=run, **dropout)


# Tests of order, workspace and launches


@pytest.mark.parametrize("setting", ["rcar2", "rcr2, query"])
def test_results_do_not_depend_on_order_and_number_of_blocks(kernels: RegulatorBackwardKernels, setting: str) -> None:
    sides, parameters = operands(setting, 20, 8)
    queries, contexts, weights = single(*sides, parameters)
    gradients = sparse_gradients(sides, parameters)
    found = set()
    for order, blocks in ((0, 1), (1, 3), (1, 3), (2, 7), (IN_ORDER, 3), (IN_ORDER + 1, 4)):
        run = {"order": order, "blocks": blocks, "seed": 3, "dropout": 0.4 if parameters.aggregations else 0.0}
        found.add(bits_of(gradients_of(kernels, (queries, contexts), weights, gradients, **run)))
        assert kernels.launches == 2
    assert len(found) == 1


def test_small_chunks_have_the_same_gradients(kernels: RegulatorBackwardKernels) -> None:
    """Without room, a chunk still holds the rows of the longest tile: a quarter more than the average of 38."""
    check_all_gradients(kernels)
    assert kernels.chunk_rows == 48
    sides, parameters = operands("rcar2", 20, 8)
    queries, contexts, weights = single(*sides, parameters)
    gradients_of(kernels, (queries, contexts), weights, sparse_gradients(sides, parameters))
    # Each of the four context sets has at most all rows, and three more for each query set.
    assert kernels.chunk_rows == 4 * (sum(QUERIES) + 3 * len(QUERIES))


def test_the_workspace_has_a_bound_for_every_batch(kernels: RegulatorBackwardKernels) -> None:
    """Beside the room: 20 bytes per pair of sets, operands, three times the weights, and a few numbers per set."""
    weights = random_weights(np.random.default_rng(0), 8, 6, 2, 1, 2, scored=1, interleaved=1)
    room = 40_000
    for n_sets in (8, 16):
        rows = np.ones((n_sets, 8), np.float32)
        offsets = np.arange(n_sets + 1)
        kernels.run(np.zeros((n_sets, n_sets), np.float32), rows, offsets, rows, offsets, weights, room=room)
        operands_of = 4 * 8 * (n_sets * 2 + 8 * n_sets + 8) + 28 * sum(tensor.size for tensor in weights.tensors)
        assert kernels.workspace_bytes < 4 * room + 20 * n_sets**2 + operands_of + 64 * n_sets + 4096


# Tests of gradients that are zero, non-finite values and invalid sets


def test_without_a_pair_all_gradients_are_zero(kernels: RegulatorBackwardKernels) -> None:
    for lengths_of, setting in (((QUERIES, CONTEXTS), "rcar2"), (([0, 0], CONTEXTS), "rcr1"), (([], []), "scan")):
        sides = tuple(random_fragments(of, 9, torch.float32) for of in lengths_of)
        parameters = random_parameters(setting, 9, 6, torch.float32)
        gradients = torch.zeros(len(lengths_of[0]), len(lengths_of[1]))
        if setting != "rcar2":
            gradients += 1.0
        found = gradients_of(kernels, (sides[0], sides[1]), parameters, gradients)
        assert kernels.pairs == 0
        assert all(bool((part == 0).all()) for part in found)


def test_numbers_that_are_not_finite_stay_in_their_pairs(kernels: RegulatorBackwardKernels) -> None:
    sides, parameters = operands("rcar2", 20, 8)
    queries, contexts, weights = single(*sides, parameters)
    gradients = torch.ones(len(queries), len(contexts))
    gradients[1] = 0.0
    right = gradients_of(kernels, (queries, contexts), weights, gradients)
    values = queries.values.clone()
    values[3] = float("nan")  # query set 1, between two sets with gradients
    found = gradients_of(kernels, (queries.with_values(values), contexts), weights, gradients)
    assert bits_of(found) == bits_of(right)
    gradients[0, 0] = float("nan")
    found = gradients_of(kernels, (queries, contexts), weights, gradients)
    assert bool(found[0][:2].isnan().all())
    assert bool(found[0][4:].isfinite().all())
    assert bool(found[1][4:].isfinite().all())


def test_sets_with_a_gradient_that_exceed_the_kernel_make_everything_nan(kernels: RegulatorBackwardKernels) -> None:
    """Callers that know the lengths never see these NaN. A longer set without a gradient does no harm."""
    for lengths_of in (([3, 33], [4]), ([3], [65, 2]), ([36, 90], [9]), ([3], [150, 70])):
        sides = tuple(random_fragments(of, 9, torch.float32) for of in lengths_of)
        parameters = random_parameters("rcar2", 9, 6, torch.float32)
        gradients = torch.ones(len(lengths_of[0]), len(lengths_of[1]))
        found = gradients_of(kernels, (sides[0], sides[1]), parameters, gradients)
        assert all(bool(part.isnan().all()) for part in found)
        gradients[1:] = gradients[:, : len(lengths_of[1]) - 1] = 0.0
        found = gradients_of(kernels, (sides[0], sides[1]), parameters, gradients)
        assert all(bool(part.isfinite().all()) for part in found)


@pytest.mark.parametrize("aligns", [False, True])
def test_long_sets_of_known_length_among_short_ones(kernels: RegulatorBackwardKernels, aligns: bool) -> None:
    sides = random_fragments([3, 70, 0, 9], 20), random_fragments([4, 100, 9], 20, seed=1)
    parameters = random_parameters("rcar2", 20, 8)
    gradients = sparse_gradients(sides, parameters, aligns=aligns)
    check_gradients(kernels, sides, parameters, gradients, aligns=aligns, run={"longest": (70, 100)}, temperature=4.0)
    queries, contexts, weights = single(*sides, parameters)
    if not aligns:  # With a length that is too short, one such gradient makes all NaN.
        found = gradients_of(kernels, (queries, contexts), weights, torch.ones(4, 3), longest=(70, 60))
        assert all(bool(part.isnan().all()) for part in found)


@pytest.mark.parametrize(
    "offsets", [[0, 30, 3, 10], [0, -5, 20, 10], [0, 4, 4, -(2**40)], [7, 2, 9, 10], [0, 2**40, 2**41, 2**42]]
)
def test_offsets_that_cannot_be_lead_nowhere(kernels: RegulatorBackwardKernels, offsets: list[int]) -> None:
    """Nothing checks offsets before a launch on a GPU, so the kernels must not read outside the values."""
    rows = random_fragments([10], 8, torch.float32).values.numpy()
    weights = random_weights(np.random.default_rng(0), 8, 6, 2, 1, 2, scored=1, interleaved=1)
    bad, good = np.array(offsets), np.array([0, 4, 6, 10])
    for queries, contexts in ((bad, good), (good, bad), (bad, bad)):
        found = kernels.run(np.ones((3, 3), np.float32), rows, queries, rows, contexts, weights)
        assert all(np.isfinite(part).all() for part in found)
        aligned = np.ones((3, 10, 6), np.float32)
        found = kernels.run(aligned, rows, queries, rows, contexts, weights, aligns=True)
        assert all(np.isfinite(part).all() for part in found)


def test_gradients_of_alignments_without_a_correspondence(kernels: RegulatorBackwardKernels) -> None:
    """A pair has a gradient if any of its numbers is not zero."""
    sides = random_fragments([2, 3], 9, torch.float32), random_fragments([4, 0], 9, torch.float32, seed=1)
    parameters = chain_of(random_parameters("rar1", 9, 6, torch.float32))
    gradients = torch.zeros(2, 5, 6)
    gradients[1, 4, 5] = 1.0
    found = gradients_of(kernels, sides, parameters, gradients, aligns=True)
    assert kernels.pairs == 1
    assert [bool(part.any()) for part in found[:2]] == [True, False]
    assert bool(found[0][4].any())
    assert not bool(found[0][:4].any())
