"""The backward CUDA kernels of cross_attention_scores in the CPU shim, against the reference.

The kernels are compiled for the CPU and simulated; no GPU is involved.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from itm_fast import Fragments, reference
from itm_fast.ops.cross_attention import CUDA_MOST_NUMBERS, beyond_backward, cuda_numbers
from python_tests.helpers.fragments import random_fragments, tied_fragments
from python_tests.helpers.shim import IN_ORDER, compiled_driver
from python_tests.shim.backward_checks import (
    DTYPES,
    cancelling_sets,
    check_gradients,
    clear_of_thresholds,
    reference_gradients,
    run,
    sparse_gradients,
)
from python_tests.shim.shim_attention import AGGREGATIONS, FOCAL_MODES, NORMALIZATIONS
from python_tests.shim.shim_backward import NEVER, ROOM, BackwardKernels

pytestmark = pytest.mark.shim

DRIVER = "cross_attention_backward"
lengths = st.sampled_from([0, 1, 1, 2, 3, 5, 8, 13])


@pytest.fixture(scope="module")
def kernels() -> BackwardKernels:
    return BackwardKernels(compiled_driver(DRIVER))


def sets(query_lengths: list[int], context_lengths: list[int], dim: int = 12, seed: int = 0, **options: Any):
    """Draw queries and contexts."""
    options = {"dtype": torch.float32, **options}
    return (
        random_fragments(query_lengths, dim, seed=2 * seed, **options),
        random_fragments(context_lengths, dim, seed=2 * seed + 1, **options),
    )


@settings(max_examples=60)
@given(st.data())
def test_gradients_of_ragged_sets(kernels: BackwardKernels, data: st.DataObject) -> None:
    """Covers every option, dtype and share of pairs with a gradient, with all pairs in one chunk and in several."""
    seed = data.draw(st.integers(0, 2**31))
    queries, contexts = sets(
        data.draw(st.lists(lengths, min_size=1, max_size=5)),
        data.draw(st.lists(lengths, min_size=1, max_size=4)),
        data.draw(st.sampled_from([3, 8, 31, 33, 40])),
        seed,
        dtype=data.draw(st.sampled_from(list(DTYPES))),
        normalized=(has_length_one := data.draw(st.booleans())),
    )
    normalization = data.draw(st.sampled_from(NORMALIZATIONS))
    # Logits of about 100 keep few fractional digits, so a comparison of two programs depends on chance.
    bounded = has_length_one or normalization not in ("clipped", "no_norm")
    options: dict[str, Any] = {
        "normalization": normalization,
        "focal": data.draw(st.sampled_from(FOCAL_MODES)),
        "aggregation": data.draw(st.sampled_from(AGGREGATIONS)),
        "temperature": data.draw(st.sampled_from([9.0, 1.0, 20.0, -3.0, 0.0] if bounded else [1.0, -0.5, 0.0])),
        "negative_slope": data.draw(st.sampled_from([0.1, 0.0, 0.5])),
        "logsumexp_temperature": data.draw(st.sampled_from([6.0, -2.0])),
    }
    share = data.draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
    gradients = sparse_gradients(len(queries), len(contexts), share, seed)
    gradients *= clear_of_thresholds(queries, contexts, **options)
    small = kernels.small_room(13, 13)
    room = data.draw(st.sampled_from([ROOM, ROOM, small, 2 * small]))
    check_gradients(kernels, queries, contexts, gradients, room=room, seed=seed, **options)


@pytest.mark.parametrize(("normalization", "focal"), list(itertools.product(NORMALIZATIONS, FOCAL_MODES)))
def test_every_normalization_and_focal_mode(kernels: BackwardKernels, normalization: str, focal: str | None) -> None:
    number = NORMALIZATIONS.index(normalization) + FOCAL_MODES.index(focal)
    queries, contexts = sets([3, 0, 5, 1], [4, 7, 2], seed=number)
    options = {"normalization": normalization, "focal": focal, "aggregation": AGGREGATIONS[number % 4]}
    gradients = sparse_gradients(4, 3, 1.0, number) * clear_of_thresholds(queries, contexts, **options)
    assert int((gradients != 0).sum()) >= 6  # At least six of the nine pairs are clear of thresholds.
    check_gradients(kernels, queries, contexts, gradients, **options)


@pytest.mark.parametrize(("normalization", "focal"), list(itertools.product(NORMALIZATIONS, FOCAL_MODES)))
def test_every_mode_with_sets_longer_than_a_tile(
    kernels: BackwardKernels, normalization: str, focal: str | None
) -> None:
    number = NORMALIZATIONS.index(normalization) + FOCAL_MODES.index(focal)
    queries, contexts = sets([66, 3], [130, 4], seed=number)
    options = {"normalization": normalization, "focal": focal, "aggregation": AGGREGATIONS[number % 4]}
    gradients = sparse_gradients(2, 2, 1.0, number) * clear_of_thresholds(queries, contexts, **options)
    assert gradients[:, 0].any()
    found = check_gradients(kernels, queries, contexts, gradients, longest=(66, 130), **options)
    assert found.longest_gram == 130


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("query_lengths", "context_lengths"), [([3, 2], [4, 640]), ([512, 1], [3, 4])])
def test_the_longest_sets(
    kernels: BackwardKernels, dtype: torch.dtype, query_lengths: list[int], context_lengths: list[int]
) -> None:
    queries, contexts = sets(query_lengths, context_lengths, 8, dtype=dtype)
    longest = max(query_lengths), max(context_lengths)
    found = check_gradients(kernels, queries, contexts, sparse_gradients(2, 2, 1.0, 0), longest=longest)
    assert found.longest_gram == max(context_lengths)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("blocks", [False, True], ids=["lists", "blocks"])
def test_gradients_with_truncated_sums(dtype: torch.dtype, blocks: bool) -> None:
    """Tensor cores cut off the last digits of sums over 264 columns, also of rows of 16 bits."""
    truncating = BackwardKernels(compiled_driver(DRIVER, "-DITM_FAST_SHIM_TRUNCATES"))
    queries, contexts = sets([3, 1, 9, 40, 12, 30], [36, 4, 1, 36, 50], 264, dtype=dtype)
    given = {"room": 150_000, "dense_share": 0.0 if blocks else NEVER}
    found = check_gradients(truncating, queries, contexts, sparse_gradients(6, 5, 1.0, 0), **given)
    assert found.blocks == ("taken" if blocks else "none")


def test_sets_longer_than_a_tile(kernels: BackwardKernels) -> None:
    """Covers more rows and columns than a block sums at a time, sets without a Gram matrix, and long lists."""
    queries, contexts = sets([66, 3], [5, 70], 9)
    check_gradients(kernels, queries, contexts, sparse_gradients(2, 2, 1.0, 0))
    for dtype in DTYPES:  # Gram matrices of more columns than a block sums at a time.
        queries, contexts = sets([3, 5], [112, 130], 8, dtype=dtype)
        check_gradients(kernels, queries, contexts, sparse_gradients(2, 2, 1.0, 0))
    queries, contexts = sets([3], [5, 641, 113], 8)  # The second set has no Gram matrix, the last one has.
    assert check_gradients(kernels, queries, contexts, sparse_gradients(1, 3, 1.0, 0)).longest_gram == 113
    for dtype, dim in itertools.product(DTYPES, (264, 141)):  # Several slices of rows, aligned or not.
        queries, contexts = sets([2, 17], [3, 5], dim, dtype=dtype)
        check_gradients(kernels, queries, contexts, sparse_gradients(2, 2, 1.0, 0))
    queries, contexts = sets([1, 2, 1] * 4, [2, 0, 1] * 12, 5)
    gradients = sparse_gradients(12, 36, 0.02, 1)
    gradients[:, 33] = 0.5  # A context set in every list.
    found = check_gradients(kernels, queries, contexts, gradients)
    assert found.pairs > 12


def test_hardest_negatives_differentiate_at_most_three_pairs_an_image(kernels: BackwardKernels) -> None:
    """Also holds if one caption is the hardest negative of all images, which makes one list long."""
    size = 10
    queries, contexts = sets([3, 2, 4, 1, 5] * 2, [4] * size, seed=3)
    for attractive in (False, True):
        scores = reference.cross_attention_scores(queries, contexts)
        if attractive:
            scores[0] += 2.0
        scores.requires_grad_()
        reference.triplet_loss(scores, mining="hardest").backward()
        found = check_gradients(kernels, queries, contexts, scores.grad)
        assert size <= found.pairs <= 3 * size
        assert int((scores.grad[0] != 0).sum()) == size if attractive else True


def test_the_launches(kernels: BackwardKernels) -> None:
    queries, contexts = sets([2, 3], [4, 1])
    gradients = torch.ones(2, 2)
    assert run(kernels, queries, contexts, gradients).launches == 2
    assert run(kernels, queries, contexts, gradients, room=kernels.small_room(3, 4)).launches == 2
    # Pairs are counted even if no gradient is requested.
    found = run(kernels, queries, contexts, gradients, for_queries=False, for_contexts=False)
    assert (found.launches, found.pairs, found.queries, found.contexts) == (1, 4, None, None)


@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_frozen_side_leaves_the_other_as_it_is(kernels: BackwardKernels, in_chunks: bool) -> None:
    queries, contexts = sets([3, 1, 5], [4, 0, 7, 2])
    room = kernels.small_room(5, 7) if in_chunks else ROOM
    gradients = sparse_gradients(3, 4, 0.8, 0)
    both = run(kernels, queries, contexts, gradients, room=room)
    of_queries = run(kernels, queries, contexts, gradients, room=room, for_contexts=False)
    of_contexts = run(kernels, queries, contexts, gradients, room=room, for_queries=False)
    assert of_queries.contexts is None
    assert of_contexts.queries is None
    assert both.pairs == of_queries.pairs == of_contexts.pairs
    assert np.array_equal(both.queries, of_queries.queries)
    assert np.array_equal(both.contexts, of_contexts.contexts)


def test_nothing_to_do(kernels: BackwardKernels) -> None:
    for query_lengths, context_lengths in (([3, 1], [2, 5]), ([0, 0], [2]), ([2], [0]), ([], [3]), ([3], []), ([], [])):
        queries, contexts = sets(query_lengths, context_lengths)
        shape = (len(query_lengths), len(context_lengths))
        gradients = torch.zeros(shape) if all(query_lengths) and all(context_lengths) else torch.ones(shape)
        found = run(kernels, queries, contexts, gradients)
        assert found.pairs == 0
        assert found.queries.tolist() == torch.zeros_like(queries.values).tolist()
        assert found.contexts.tolist() == torch.zeros_like(contexts.values).tolist()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_rows_of_zeros_receive_no_gradient(
    kernels: BackwardKernels, normalization: str, in_chunks: bool, dtype: torch.dtype
) -> None:
    queries, contexts = sets([3, 2, 1], [4, 2, 1], 40, dtype=dtype)
    room = kernels.small_room(3, 4) if in_chunks else ROOM
    queries.values[[1, 5]] = 0.0  # one row, and all of the last set
    contexts.values[[2, 4, 5]] = 0.0  # one row, and all of the second set
    gradients = sparse_gradients(3, 3, 1.0, 0)
    found = check_gradients(kernels, queries, contexts, gradients, normalization=normalization, room=room)
    assert not found.queries[[1, 5]].any()
    assert not found.contexts[[2, 4, 5]].any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_vectors_that_cancel(kernels: BackwardKernels, aggregation: str) -> None:
    """A Gram matrix would lose the digits of the attended vectors, so they are formed."""
    queries, contexts = cancelling_sets(6)
    options = {"temperature": 0.01, "aggregation": aggregation}
    check_gradients(kernels, queries, contexts, sparse_gradients(6, 6, 1.0, 0), **options)


def test_equal_cosines_send_the_gradient_of_the_maximum_to_the_first(kernels: BackwardKernels) -> None:
    queries, contexts = sets([3], [2])
    queries.values[1] = queries.values[0]
    queries.values[2] = -queries.values[0]
    found = run(kernels, queries, contexts, torch.ones(1, 1), aggregation="max", normalization="no_norm")
    assert np.abs(found.queries[0]).max() > 0.01
    assert not found.queries[1:].any()


@pytest.mark.parametrize("in_chunks", [False, True])
def test_hard_attention_gives_the_gradient_to_the_first_of_equal_contexts(
    kernels: BackwardKernels, in_chunks: bool
) -> None:
    room = kernels.small_room(9, 8) if in_chunks else ROOM
    queries, contexts = tied_fragments([3, 0, 9, 1], 6, torch.float32), tied_fragments([8, 1, 5], 6, torch.float32, 1)
    gradients = sparse_gradients(4, 3, 0.8, 0)
    for normalization, aggregation in (("no_norm", "logsumexp"), ("clipped", "mean")):
        options = {"focal": "hard", "normalization": normalization, "aggregation": aggregation}
        options |= {"temperature": 2.0, "negative_slope": 0.5}
        found = run(kernels, queries, contexts, gradients, room=room, **options)
        exact = reference_gradients(queries, contexts, gradients, torch.float64, **options)
        for actual, expected in zip((found.queries, found.contexts), exact, strict=True):
            np.testing.assert_allclose(actual, expected.numpy(), rtol=0, atol=1e-5)


def test_hard_attention_keeps_what_is_no_number_as_plain_pytorch_does(kernels: BackwardKernels) -> None:
    """No gradient flows through the selection: a NaN product does not reach the gradients of other words."""
    for place in ("word", "region"):
        queries, contexts = sets([3, 1, 2], [4, 2, 3])
        (queries if place == "word" else contexts).values[1, 2] = math.nan
        found = run(kernels, queries, contexts, torch.ones(3, 3), focal="hard")
        exact = reference_gradients(queries, contexts, torch.ones(3, 3), torch.float64, focal="hard")
        for actual, expected in zip((found.queries, found.contexts), exact, strict=True):
            np.testing.assert_allclose(actual, expected.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_incoming_gradient_that_is_not_finite_stays_with_its_pair(kernels: BackwardKernels, value: float) -> None:
    queries, contexts = sets([3, 1, 2], [4, 2, 3])
    gradients = torch.eye(3)
    right = run(kernels, queries, contexts, gradients)
    gradients[1, 1] = value
    found = run(kernels, queries, contexts, gradients)
    assert found.pairs == 3
    for actual, expected, side in ((found.queries, right.queries, queries), (found.contexts, right.contexts, contexts)):
        rows = (side.set_index() == 1).numpy()
        assert not np.isfinite(actual[rows]).any()
        assert np.array_equal(actual[~rows], expected[~rows])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_reach_their_pairs_alone(kernels: BackwardKernels, value: float) -> None:
    queries, contexts = sets([3, 1, 2], [4, 2, 3])
    gradients = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.0, 0.0], [0.0, 1.0, 0.0]])
    right = run(kernels, queries, contexts, gradients)
    contexts.values[7] = value  # in a set without a pair
    contexts.values[4] = value  # in the pair of query set 2 and context set 1
    found = run(kernels, queries, contexts, gradients)
    assert np.array_equal(found.queries[:4], right.queries[:4])
    assert np.isnan(found.queries[4:]).all()
    assert np.array_equal(found.contexts[:4], right.contexts[:4])
    assert np.isnan(found.contexts[4:6]).all()
    assert not found.contexts[6:].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_word_that_is_not_finite_in_a_set_without_a_pair_gets_no_gradient(
    kernels: BackwardKernels, value: float
) -> None:
    queries, contexts = sets([3, 4], [4, 2])
    gradients = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    right = run(kernels, queries, contexts, gradients)
    queries.values[5, 2] = value
    found = run(kernels, queries, contexts, gradients)
    assert not found.queries[3:].any()
    assert np.array_equal(found.queries, right.queries)
    assert np.array_equal(found.contexts, right.contexts)


@pytest.mark.parametrize("in_chunks", [False, True])
def test_results_do_not_depend_on_the_order_of_blocks_and_threads(kernels: BackwardKernels, in_chunks: bool) -> None:
    """Also not on the number of blocks, which the driver draws from the seed."""
    queries, contexts = sets([9, 1, 5, 17, 2], [11, 4, 7], 40)
    room = kernels.small_room(17, 11) if in_chunks else ROOM
    gradients = sparse_gradients(5, 3, 0.9, 0)
    seeds = (*range(4), IN_ORDER, IN_ORDER + 1)
    found = [run(kernels, queries, contexts, gradients, room=room, seed=seed) for seed in seeds]
    assert len({(part.queries.tobytes(), part.contexts.tobytes(), part.pairs) for part in found}) == 1


def test_a_pair_that_no_room_holds_is_not_a_number(kernels: BackwardKernels) -> None:
    """A pair of 9 queries and 8 contexts with a room for 8 and 8 makes only the gradients of its own sets NaN."""
    queries, contexts = sets([3, 9, 2], [4, 8, 1])
    gradients = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    right = run(kernels, queries, contexts, gradients)
    found = run(kernels, queries, contexts, gradients, room=kernels.small_room(8, 8))
    for actual, expected, side in ((found.queries, right.queries, queries), (found.contexts, right.contexts, contexts)):
        rows = (side.set_index() == 1).numpy()
        assert np.isnan(actual[rows]).all()
        np.testing.assert_allclose(actual[~rows], expected[~rows], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("lengths", [(1, 1), (9, 8), (512, 640), (720, 760), (1, 68_000)])
def test_such_pairs_are_known_before_the_scores(kernels: BackwardKernels, lengths: tuple[int, int]) -> None:
    assert ROOM == 2 * CUDA_MOST_NUMBERS
    assert cuda_numbers(*lengths) == kernels.numbers(*lengths)
    values = torch.zeros(1, 4).expand(sum(lengths), 4)
    queries, contexts = (
        Fragments(part, torch.tensor([0, len(part)]), max_length=len(part)) for part in values.split(lengths)
    )
    wanted = Fragments(queries.values.clone().requires_grad_(), queries.offsets, max_length=lengths[0])
    too_many = kernels.numbers(*lengths) > ROOM // 2
    assert too_many == (lengths in [(720, 760), (1, 68_000)])
    reason = "the CUDA gradient of cross_attention_scores supports pairs of at most about 500,000 raw scores"
    assert beyond_backward("cuda", wanted, contexts) == (reason if too_many else None)
    unknown = Fragments(wanted.values, wanted.offsets)
    assert [beyond_backward("cpu", wanted, contexts), beyond_backward("cuda", unknown, contexts)] == [None, None]
    assert beyond_backward("cuda", queries, contexts) is None
    with torch.no_grad():
        assert beyond_backward("cuda", wanted, contexts) is None


def test_the_workspace_follows_the_pairs_of_a_chunk(kernels: BackwardKernels) -> None:
    """Lists of 16 bytes per pair of sets, Gram matrices, a number per query, and what does not grow with the batch."""
    sizes = {"query_sets": 128, "query_rows": 128 * 13, "context_sets": 128, "context_rows": 128 * 36, "dim": 1024}
    for times in (1, 8):
        larger = {name: value if name == "dim" else times * value for name, value in sizes.items()}
        growing = 16 * larger["query_sets"] * larger["context_sets"]
        growing += 6 * 112 * larger["context_rows"] + 4 * larger["query_rows"]
        growing += 6 * 640**2  # one long set
        assert growing < kernels.workspace_bytes(**larger) < growing + 34e6
        # If pairs may exceed a chunk, gradients of 16-bit rows are summed in float32.
        sums = 4 * 1024 * (larger["query_rows"] + larger["context_rows"])
        assert kernels.workspace_bytes(**larger, element_bytes=2) == kernels.workspace_bytes(**larger) + sums
    # A batch of 1,024 with hardest negatives: three pairs per image take two chunks.
    assert kernels.workspace_bytes(**larger) < 79e6
    assert 3 * 1024 * kernels.numbers(13, 36) < 2 * (ROOM - kernels.numbers(13, 36))
    # Small calls take what they need.
    small = {"query_sets": 3, "query_rows": 9, "context_sets": 2, "context_rows": 8, "dim": 16}
    assert kernels.workspace_bytes(**small) < 50e3


def test_gram_matrices_have_room_for_sets_a_quarter_longer_than_the_average(kernels: BackwardKernels) -> None:
    """The longest have 640 contexts."""
    sizes = {"query_sets": 64, "query_rows": 64 * 512, "context_sets": 64, "dim": 16}
    without = kernels.workspace_bytes(context_rows=64 * 36, **sizes) - 6 * 64 * 36 * 112
    for length, longest in ((112, 144), (196, 248), (400, 504), (576, 640), (700, 640)):
        matrices = kernels.workspace_bytes(context_rows=64 * length, **sizes) - without
        assert abs(matrices - 6 * 64 * length * longest) < 1024, length


def test_gram_matrices_have_room_for_the_longest_set_if_its_length_is_known(kernels: BackwardKernels) -> None:
    """Beside short sets, the matrices of all contexts have 64 million numbers at most, and room for one of 640 rows."""
    for n_sets, average, longest, columns in (
        *((64, 36, 36, 112), (64, 36, 300, 304), (64, 36, 640, 640), (64, 36, 2**40, 640)),
        *((64, 196, 196, 200), (64, 640, 640, 640), (64, 700, 700, 640), (5000, 40, 640, 320)),
    ):
        sizes = {"query_sets": 64, "query_rows": 64 * 512, "context_sets": n_sets, "dim": 16}
        short, known = (
            kernels.workspace_bytes(context_rows=n_sets * average, longest=(0, length), **sizes)
            for length in (1, longest)
        )
        more = n_sets * average * (columns - 112) + (640**2 if longest > columns else 0)
        assert abs(known - short - 6 * more) < 1024, (n_sets, average, longest)


@pytest.mark.parametrize("longest", [1, 40, 200, 2**40, -5])
def test_a_wrong_length_of_the_longest_set_changes_no_gradient(kernels: BackwardKernels, longest: int) -> None:
    """If it is too short, the long set has no Gram matrix."""
    queries, contexts = sets([3, 2], [5, 200, 9, 2])
    found = check_gradients(kernels, queries, contexts, sparse_gradients(2, 4, 1.0, 0), longest=(1, longest))
    assert found.longest_gram == (9 if longest in (1, 40) else 200)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_few_long_sets_among_short_ones_have_gram_matrices(kernels: BackwardKernels, dtype: torch.dtype) -> None:
    """They share what short sets leave of the room, in their order."""
    queries, contexts = sets([3, 2], [5] * 12 + [130] + [7, 1, 128], dtype=dtype)
    gradients = sparse_gradients(2, 16, 0.8, 0)
    assert gradients[:, 12].any()
    found = check_gradients(kernels, queries, contexts, gradients)
    assert found.longest_gram == 130


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_small", [False, True])
def test_rows_behind_the_last_set_have_no_gradient(
    kernels: BackwardKernels, dtype: torch.dtype, is_small: bool
) -> None:
    """`torch.compile` moves padding there. In one chunk, and in several."""
    sides = [random_fragments([3, 2], 8, dtype, seed) for seed in (1, 2)]
    padded = [
        Fragments(torch.cat([side.values, torch.ones(3, 8, dtype=dtype)]), side.offsets, check=False) for side in sides
    ]
    room = kernels.small_room(3, 3) if is_small else ROOM
    found = run(kernels, *padded, torch.ones(2, 2), room=room)
    expected = run(kernels, *sides, torch.ones(2, 2), room=room)
    for rows, own in ((found.queries, expected.queries), (found.contexts, expected.contexts)):
        assert not rows[5:].any()
        assert (rows[:5] == own).all()


def test_rows_without_a_set_have_gradients_of_zero(kernels: BackwardKernels) -> None:
    queries, contexts = sets([3, 5], [4, 2])
    without = [Fragments(side.values, torch.tensor([0]), check=False) for side in (queries, contexts)]
    found = run(kernels, without[0], contexts, torch.ones(0, 2), for_contexts=False)
    assert not found.queries.any()
    found = run(kernels, queries, without[1], torch.ones(2, 0), for_queries=False)
    assert not found.contexts.any()


def test_offsets_that_the_contract_forbids_lead_nowhere(kernels: BackwardKernels) -> None:
    """Arrays have their exact size, so that a sanitizer sees an access outside; here the numbers stay finite."""
    queries, contexts = sets([3, 5, 2], [4, 8, 1])
    for offsets in ([0, 50, 2, 10], [-7, 3, 9, 10], [0, 9, 4, -1]):
        bad = Fragments(queries.values, torch.tensor(offsets), check=False)
        found = run(kernels, bad, contexts, torch.ones(3, 3))
        assert np.isfinite(found.contexts).all()
        assert 0 <= found.pairs <= 9


def test_offsets_that_make_more_rows_than_32_bits_count_lead_nowhere(kernels: BackwardKernels) -> None:
    """Every second set holds all rows. No pair fits the workspace, which requires a row count without overflow."""
    n_rows, n_sets = 1 << 23, 8224  # A warp's run of sets has at least 2^31 rows, and each set exceeds the workspace.
    offsets = torch.arange(n_sets + 1) % 2 * n_rows
    queries = Fragments(torch.ones(n_rows, 1), offsets, check=False, max_length=n_rows)
    contexts = Fragments(torch.ones(1, 1), torch.tensor([0, 1]))
    found = run(kernels, queries, contexts, torch.ones(n_sets, 1), room=170, for_queries=False)
    assert (found.pairs, found.launches) == (n_sets // 2, 2)
    assert np.isnan(found.contexts).all()
