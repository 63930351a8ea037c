"""The CUDA forward of `cross_attention_scores` in the CPU shim (docs/internals/shim.md), against the reference.

The kernels are compiled for the CPU and simulated; no GPU is involved. The small tile of the tests has 48 rows and 64
columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import costs
from itm_fast import Fragments, reference
from python_tests.helpers.fragments import random_fragments, tied_fragments
from python_tests.helpers.shim import compiled_driver
from python_tests.helpers.tolerance import assert_close_to_exact, max_error
from python_tests.shim.attention_checks import (
    DTYPES,
    array,
    cancelling_contexts,
    check_random_scores,
    check_scores,
    scores_of,
)
from python_tests.shim.shim_attention import AGGREGATIONS, FOCAL_MODES, NORMALIZATIONS, AttentionKernels

pytestmark = pytest.mark.shim

seeds = st.integers(0, 2**31)
# Several tiles on both sides; query set 2 and context set 1 are empty.
QUERY_LENGTHS, CONTEXT_LENGTHS = [3, 5, 0, 30, 29, 2], [4, 0, 6, 17, 20, 33]


@pytest.fixture(scope="module")
def kernels() -> AttentionKernels:
    return AttentionKernels(compiled_driver("cross_attention"))


@pytest.fixture(scope="module")
def truncating(tmp_path_factory: pytest.TempPathFactory) -> AttentionKernels:
    """Kernels on simulated tensor cores that truncate sums instead of rounding them."""
    return AttentionKernels(compiled_driver("cross_attention", "-DITM_FAST_SHIM_TRUNCATES"))


# Tests of the plan


@settings(max_examples=60)
@given(st.lists(st.sampled_from([0, 1, 2, 7, 20, 48, 49, 300]), max_size=150), st.integers(0, 9), seeds)
def test_tiles_hold_as_many_sets_as_fit(kernels: AttentionKernels, lengths: list[int], short: int, seed: int) -> None:
    lengths = [1] * 33 * (short == 0) + lengths + [0] * 70 * (short == 1)
    tiles, most = kernels.plan(lengths, 48, seed)
    expected: list[int] = []
    rows = sets = 0
    for number, length in enumerate(lengths):
        if not expected or rows + length > 48 or sets == 32:
            expected.append(number)
            rows = sets = 0
        rows, sets = rows + length, sets + 1
    assert tiles == [*expected, len(lengths)]
    assert len(expected) <= most <= len(lengths)
    # The cost model gives the same counts.
    assert (costs.tiles(lengths, 48), costs.most_tiles(len(lengths), sum(lengths), 48)) == (len(expected), most)


def test_no_more_blocks_than_twice_the_tiles_of_a_batch(kernels: AttentionKernels) -> None:
    """128 images of 36 regions: 43 tiles of three images. Each surplus block costs the launch a little time."""
    tiles, most = kernels.plan([36] * 128, 112)
    assert (len(tiles) - 1, most) == (43, 86)


# Tests of the scores


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("focal", FOCAL_MODES)
def test_every_option(kernels: AttentionKernels, normalization: str, focal: str | None) -> None:
    number = NORMALIZATIONS.index(normalization) + len(NORMALIZATIONS) * FOCAL_MODES.index(focal)
    options: dict[str, Any] = {"normalization": normalization, "focal": focal, "negative_slope": (0.1, 0.0)[number % 2]}
    options |= {"aggregation": AGGREGATIONS[number % 4], "temperature": (9.0, 20.0, -2.0)[number % 3]}
    kernel = ("float32", "bf16", "fp16")[number % 3]
    check_random_scores(kernels, [3, 5, 0, 30], [4, 0, 6, 17, 20], 24, kernel, seed=number, **options)


@settings(max_examples=40)
@given(st.data())
def test_ragged_sets_of_any_width(kernels: AttentionKernels, data: st.DataObject) -> None:
    """Covers unaligned rows, empty sets and single rows; the bound is from rounding draws of plain PyTorch."""
    lengths = st.lists(st.sampled_from([0, 1, 2, 5, 13, 24, 36, 47]), min_size=1, max_size=5)
    check_random_scores(
        kernels,
        data.draw(lengths),
        data.draw(lengths),
        data.draw(st.sampled_from([5, 8, 16, 33, 40])),
        data.draw(st.sampled_from(["float32", "bf16", "fp16"])),
        by_draws=True,
        normalization=data.draw(st.sampled_from(NORMALIZATIONS)),
        aggregation=data.draw(st.sampled_from(AGGREGATIONS)),
        temperature=data.draw(st.sampled_from([1.0, 4.0, 9.0, 20.0])),
        negative_slope=data.draw(st.sampled_from([0.0, 0.1, 1.0])),
        shift=data.draw(st.sampled_from([0, 0, 1, 5])),
        wide_offsets=data.draw(st.booleans()),
        seed=data.draw(seeds),
    )


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_narrow_rows(kernels: AttentionKernels, dim: int) -> None:
    """Contexts of narrow rows cancel; the rule for the Gram form allows an error up to a factor of 512."""
    queries, contexts = random_fragments(QUERY_LENGTHS, dim), random_fragments(CONTEXT_LENGTHS, dim, seed=1)
    for kernel, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        rounded = queries.to(dtype), contexts.to(dtype)
        exact = reference.cross_attention_scores(*(part.to(torch.float64) for part in rounded), temperature=2.0)
        actual = scores_of(kernels, *rounded, kernel, temperature=2.0, shift=1)
        assert max_error(actual, exact) < 512 * torch.finfo(torch.float32).eps


# Most sets are short or empty, so that the few long ones of unknown length are scored without tensor cores.
LONG: list[Any] = [
    ([3, 70], [4, 60, 0], 40, {}),  # long sets on both sides
    ([3, 0, 70], [4, 6], 9, {"normalization": "softmax", "aggregation": "logsumexp"}),
    ([3, 2], [4, 60], 150, {"focal": "prob", "aggregation": "max"}),  # more elements than threads
    ([2], [140, 5, 0, 0], 3, {"focal": "equal", "normalization": "no_norm"}),  # more contexts than threads
    ([33], [129, 0, 0], 2, {"normalization": "softmax", "aggregation": "sum"}),  # three runs of row factors
    ([17], [340, *[0] * 7], 2, {"focal": "prob", "aggregation": "sum"}),  # more contexts than fit into a piece
    ([2], [700, *[0] * 14], 3, {"normalization": "clipped_l1norm", "temperature": 20.0}),
    ([33], [340, *[0] * 7], 3, {"focal": "hard", "normalization": "no_norm", "aggregation": "logsumexp"}),
]


@pytest.mark.parametrize(("query_lengths", "context_lengths", "dim", "options"), LONG)
def test_sets_longer_than_a_tile(
    kernels: AttentionKernels, query_lengths: list[int], context_lengths: list[int], dim: int, options: dict[str, Any]
) -> None:
    check_random_scores(kernels, query_lengths, context_lengths, dim, "bf16" if dim % 2 else "float32", **options)


# The average set of a side is longer than a tile, so that pairs of tiles are scored on tensor cores, piece by piece.
MOSTLY_LONG: list[Any] = [
    ([3, 5, 0, 9], [60, 49, 100, 4], 40, {}),
    # Long queries with several short contexts.
    ([70, 90, 3], [4, 0, 6], 24, {"aggregation": "logsumexp", "normalization": "l2norm"}),
    # Both; two and three tiles of queries.
    ([70, 129, 65], [100, 52], 16, {"focal": "equal", "normalization": "clipped_l1norm", "temperature": 20.0}),
    ([13, 2, 7], [196], 33, {"normalization": "softmax", "aggregation": "max"}),  # unaligned rows
    ([3, 80], [60, 200, 40], 24, {"focal": "prob", "normalization": "l1norm"}),  # 200 rows do not fit the slab
    ([2, 40], [97, 57, 113], 24, {"focal": "hard", "normalization": "no_norm", "aggregation": "sum"}),
]


@pytest.mark.parametrize("kernel", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize(("query_lengths", "context_lengths", "dim", "options"), MOSTLY_LONG)
def test_long_sets_on_tensor_cores(
    kernels: AttentionKernels,
    query_lengths: list[int],
    context_lengths: list[int],
    dim: int,
    options: dict[str, Any],
    kernel: str,
) -> None:
    check_random_scores(kernels, query_lengths, context_lengths, dim, kernel, by_draws=True, **options)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("focal", FOCAL_MODES)
def test_every_option_with_sets_longer_than_a_tile(
    kernels: AttentionKernels, normalization: str, focal: str | None
) -> None:
    number = NORMALIZATIONS.index(normalization) + len(NORMALIZATIONS) * FOCAL_MODES.index(focal)
    options: dict[str, Any] = {"normalization": normalization, "focal": focal, "aggregation": AGGREGATIONS[number % 4]}
    kernel = ("float32", "bf16", "fp16")[number % 3]
    check_random_scores(kernels, [70, 66], [130, 60], 24, kernel, by_draws=True, **options)


@pytest.mark.thorough
def test_the_longest_sets_on_tensor_cores(kernels: AttentionKernels) -> None:
    """640 contexts and 512 queries; the next longer ones take the ordinary units."""
    check_random_scores(kernels, [512, 3], [640], 8, "bf16", by_draws=True)
    check_random_scores(kernels, [2], [641], 8, "bf16", by_draws=True)


# A set is longer than a tile among shorter ones.
ONE_LONG: list[Any] = [
    ([3, 5, 0, 9], [40, 20, 300, 4], 24, {}),
    ([3, 70, 9, 2], [4, 17, 6], 24, {"aggregation": "logsumexp"}),
    ([3, 5, 70], [4, 17, 60, 0], 33, {"focal": "equal", "normalization": "softmax"}),
]


@pytest.mark.parametrize("kernel", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize(("query_lengths", "context_lengths", "dim", "options"), ONE_LONG)
def test_a_long_set_of_known_length_among_short_ones(
    kernels: AttentionKernels,
    query_lengths: list[int],
    context_lengths: list[int],
    dim: int,
    options: dict[str, Any],
    kernel: str,
) -> None:
    longest = max(query_lengths), max(context_lengths)
    check_random_scores(kernels, query_lengths, context_lengths, dim, kernel, by_draws=True, longest=longest, **options)


def test_tensor_cores_take_long_sets_of_known_length(kernels: AttentionKernels) -> None:
    """They round rows to bfloat16 here; the ordinary units do not."""
    queries, contexts = (
        random_fragments([3, 5, 9], 24, torch.float32),
        random_fragments([40, 300, 4], 24, torch.float32),
    )
    unknown, known, too_short = (
        scores_of(kernels, queries, contexts, "float32_as_bf16", longest=longest)
        for longest in ((0, 0), (9, 300), (9, 299))
    )
    exact = reference.cross_attention_scores(queries.to(torch.float64), contexts.to(torch.float64))
    assert torch.equal(unknown[:, [0, 2]], known[:, [0, 2]])
    assert torch.equal(too_short, known), "300 rows fit a slab of 304"
    assert max_error(unknown[:, 1], exact[:, 1]) < 1e-6 < 1e-5 < max_error(known[:, 1], exact[:, 1]) < 1e-2


@pytest.mark.parametrize("longest", [(1, 1), (70, 64), (64, 103), (0, 40), (-3, -(2**50)), (2**60, 2**60)])
def test_wrong_lengths_change_the_path_and_no_score(kernels: AttentionKernels, longest: tuple[int, int]) -> None:
    """Kernels compare the real lengths with the memory."""
    check_random_scores(kernels, [3, 70, 9], [9, 101, 40], 24, by_draws=True, longest=longest)


@pytest.mark.parametrize(
    ("queries", "contexts", "longest", "slab"),
    [
        ((13, 128), (36, 128), (0, 0), [0, 0, 0]),
        ((13, 128), (36, 128), (24, 36), [0, 0, 0]),
        ((13, 128), (36, 128), (128, 112), [0, 0, 0]),
        ((13, 128), (36, 128), (129, 1), [112, 136, 264]),
        ((13, 128), (36, 128), (24, 300), [304, 128, 264]),
        ((13, 128), (36, 128), (2**40, 2**40), [640, 512, 175]),
        ((13, 128), (196, 128), (0, 0), [248, 128, 264]),
        ((13, 128), (196, 128), (24, 196), [200, 128, 264]),
        ((13, 128), (196, 128), (24, 36), [0, 0, 0]),
        ((13, 128), (700, 1), (24, 700), [640, 128, 30]),
        ((0, 0), (0, 0), (300, 300), [0, 0, 0]),
        ((13, 512), (36, 5000), (24, 640), [360, 128, 264]),
        ((13, 512), (196, 5000), (24, 640), [248, 128, 264]),
        ((13, 512), (36, 50_000), (24, 640), [0, 0, 0]),
    ],
)
def test_slabs_follow_known_lengths_and_the_memory(
    kernels: AttentionKernels,
    queries: tuple[int, int],  # average length and number of sets
    contexts: tuple[int, int],
    longest: tuple[int, int],
    slab: list[int],
) -> None:
    """Gram matrices take 256 MB at most for one long set, all slabs 520 MB.

    All contexts have a Gram matrix of as many columns as a slab has rows.
    """
    sizes = [part for average, n_sets in (queries, contexts) for part in (n_sets, average * n_sets)]
    assert kernels.slab(*sizes, longest) == slab


def test_long_contexts_that_cancel_form_their_attended_vectors(kernels: AttentionKernels) -> None:
    """Rows 2 k and 2 k + 1 nearly cancel. With temperature 0, all contexts have the same attention."""
    pairs = random_fragments([40], 24, seed=1).values
    rest = 1e-4 * random_fragments([40], 24, seed=2).values
    contexts = Fragments(torch.stack([pairs, rest - pairs], dim=1).flatten(0, 1), torch.tensor([0, 80]))
    check_scores(kernels, random_fragments([3, 9], 24), contexts, temperature=0.0)


@pytest.mark.parametrize("kernel", ["float32", "bf16"])
def test_the_tile_of_the_launchers(kernels: AttentionKernels, kernel: str) -> None:
    """112 x 128 with four stages and eight warps; two tiles on either side."""
    check_random_scores(kernels, [13] * 10, [36] * 4, 72, kernel, large=True)


@pytest.mark.parametrize("kernel", ["float32", "bf16"])
def test_equal_logits_go_to_the_first_context(kernels: AttentionKernels, kernel: str) -> None:
    """The tied contexts differ; they are in short sets, in long sets, and in pieces of long sets."""
    queries = tied_fragments([3, 70, 1], 6, seed=1)
    # On average, the sets of the first are longer than a tile, and those of the second are not.
    for normalization, lengths in (("no_norm", [40, 1, 0, 7, 60, 340]), ("clipped", [1, 60, *[0] * 7, 340])):
        contexts = tied_fragments(lengths, 6, seed=2)
        options = {"focal": "hard", "normalization": normalization, "negative_slope": 0.5, "temperature": 2.0}
        single = [part.to(DTYPES.get(kernel, torch.float32)) for part in (queries, contexts)]
        actual = scores_of(kernels, *single, kernel, **options)
        assert max_error(actual, reference.cross_attention_scores(queries, contexts, **options)) < 1e-6


# Tests of the precisions


@pytest.mark.parametrize("cores", ["kernels", "truncating"])
@pytest.mark.parametrize("positive", [False, True])
def test_the_precisions_at_a_usual_width(request: pytest.FixtureRequest, cores: str, positive: bool) -> None:
    """Products of positive rows have one sign, so truncation errors of sums do not cancel."""
    kernels = request.getfixturevalue(cores)
    queries, contexts = (random_fragments([n], 1024, torch.float32, seed=n) for n in (13, 36))
    if positive:
        queries.values.abs_()
        contexts.values.abs_()
    exact = reference.cross_attention_scores(queries.to(torch.float64), contexts.to(torch.float64))
    plain = reference.cross_attention_scores(queries, contexts)
    highest, high, medium = (
        scores_of(kernels, queries, contexts, kernel) for kernel in ("float32", "float32_as_bf16x3", "float32_as_bf16")
    )
    assert_close_to_exact(highest, plain, exact)
    assert max_error(high, exact) < 1e-6
    # bfloat16 products: at most twice the error of rounding the inputs.
    rounded = reference.cross_attention_scores(
        queries.to(torch.bfloat16).to(torch.float32), contexts.to(torch.bfloat16).to(torch.float32)
    )
    if positive:  # The norms are computed before rounding.
        assert max_error(medium, exact) < 1e-4
    else:
        assert_close_to_exact(medium, rounded, exact)
    assert max_error(medium, exact) > 1e-6


@pytest.mark.parametrize("kernel", ["bf16", "fp16"])
def test_rows_of_16_bits_at_a_usual_width(truncating: AttentionKernels, kernel: str) -> None:
    """Tensor cores add up the products of 1,024 positive components, and cut off as many sums."""
    queries, contexts = (random_fragments([n], 1024, DTYPES[kernel], seed=n) for n in (13, 36))
    queries.values.abs_()
    contexts.values.abs_()
    exact = reference.cross_attention_scores(queries.to(torch.float64), contexts.to(torch.float64))
    assert max_error(scores_of(truncating, queries, contexts, kernel), exact) < 2e-5


@pytest.mark.parametrize("kernel", ["bf16", "fp16", "float32", "float32_as_bf16x3"])
def test_long_sets_on_tensor_cores_that_truncate(truncating: AttentionKernels, kernel: str) -> None:
    """Sets have more rows than their width, so attended vectors of 16 bits are formed. Others take Gram matrices."""
    dtype = DTYPES.get(kernel, torch.float32)
    queries, contexts = (random_fragments(n, 40, dtype, seed=n[0]) for n in ([70, 65], [100, 120]))
    queries.values.abs_()
    contexts.values.abs_()
    exact = reference.cross_attention_scores(queries.to(torch.float64), contexts.to(torch.float64))
    error = max_error(scores_of(truncating, queries, contexts, kernel), exact)
    assert error < (2e-5 if kernel in DTYPES and dtype != torch.float32 else 1e-6)


def test_raw_scores_of_three_parts_keep_every_digit(kernels: AttentionKernels) -> None:
    """With one context per set, the score is <q, x> / |q| |x|; the numbers need all 24 bits."""
    generator = torch.Generator().manual_seed(0)
    mantissas = torch.randint(2**23, 2**24, (2, 16, 40), generator=generator, dtype=torch.float64)
    queries, contexts = (Fragments(part * 2.0**-24, torch.arange(17)) for part in mantissas)
    check_scores(kernels, queries, contexts)
    single, double = (
        reference.cross_attention_scores(queries.to(dtype), contexts.to(dtype))
        for dtype in (torch.float32, torch.float64)
    )
    two_parts = scores_of(kernels, queries.to(torch.float32), contexts.to(torch.float32), "float32_as_bf16x3")
    # Two parts lose digits that the third part keeps.
    assert max_error(two_parts, double) > 2 * max_error(single, double)


@pytest.mark.parametrize("remainder", [1e-2, 1e-4, 0.0])
def test_contexts_that_cancel(kernels: AttentionKernels, remainder: float) -> None:
    """The attended vector is much shorter than its terms, so the kernel must form it."""
    check_scores(kernels, random_fragments([3, 9], 24, seed=3), cancelling_contexts(remainder), temperature=0.0)


# Tests of non-finite values and zeros


def test_zero_rows_score_zero(kernels: AttentionKernels) -> None:
    queries, contexts = random_fragments([3, 2], 8, seed=1), random_fragments([4, 2], 8, seed=2)
    queries.values[:3] = 0.0
    contexts.values[4:] = 0.0
    for normalization in NORMALIZATIONS:
        check_scores(kernels, queries, contexts, normalization=normalization)
        single = scores_of(
            kernels, queries.to(torch.float32), contexts.to(torch.float32), "float32", normalization=normalization
        )
        assert single[0].tolist() == [0.0, 0.0]
        assert single[1, 1] == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kernel", ["float32", "bf16"])
@pytest.mark.parametrize("focal", [None, "hard"])
def test_what_is_not_finite_stays_with_its_sets(
    kernels: AttentionKernels, kernel: str, value: float, focal: str | None
) -> None:
    dtype = torch.bfloat16 if kernel == "bf16" else torch.float32
    queries, contexts = (random_fragments([3, 2, 4], 8, dtype, seed=seed) for seed in (1, 2))
    right = scores_of(kernels, queries, contexts, kernel, focal=focal)
    contexts.values[4, 5] = value
    for aggregation in AGGREGATIONS:
        scores = scores_of(kernels, queries, contexts, kernel, focal=focal, aggregation=aggregation)
        assert bool(scores[:, 1].isnan().all())
        assert bool(scores[:, [0, 2]].isfinite().all())
        plain = reference.cross_attention_scores(
            queries.to(torch.float32), contexts.to(torch.float32), focal=focal, aggregation=aggregation
        )
        assert torch.equal(plain.isnan(), scores.isnan())
    assert torch.equal(scores_of(kernels, queries, contexts, kernel, focal=focal)[:, [0, 2]], right[:, [0, 2]])


# Tests of order and offsets


@pytest.mark.parametrize("kernel", ["float32", "bf16"])
def test_results_do_not_depend_on_the_order_of_blocks_and_threads(kernels: AttentionKernels, kernel: str) -> None:
    dtype = torch.bfloat16 if kernel == "bf16" else torch.float32
    queries = random_fragments([3, 30, 40, 70], 20, dtype, seed=1)
    contexts = random_fragments([6, 17, 30], 20, dtype, seed=2)
    found = {array(scores_of(kernels, queries, contexts, kernel, seed=seed)).tobytes() for seed in range(4)}
    assert len(found) == 1


def test_a_score_does_not_depend_on_its_neighbours(kernels: AttentionKernels) -> None:
    queries = random_fragments([3, 30, 29], 20, torch.float32, seed=1)
    contexts = random_fragments([6, 17, 30], 20, torch.float32, seed=2)
    together = scores_of(kernels, queries, contexts, "float32")
    for i in range(3):
        for j in range(3):
            alone = [part.index_select(torch.tensor([n])) for part, n in ((queries, i), (contexts, j))]
            assert scores_of(kernels, *alone, "float32").item() == together[i, j].item()


@pytest.mark.parametrize(
    "offsets",
    [[0, 900, 3, 10], [0, -5, 20, 10], [0, 4, 4, -(2**40)], [7, 2, 9, 10], [0, 2**40, 2**41, 2**42], [0, 0, 60, 61]],
)
def test_offsets_that_cannot_be_lead_nowhere(kernels: AttentionKernels, offsets: list[int]) -> None:
    """Nothing checks offsets before a launch on a GPU, so the kernels must not read outside the values."""
    rows = random_fragments([10], 8, torch.float32).values.numpy()
    given, right = np.array(offsets), np.array([0, 4, 6, 10])
    for queries, contexts in ((given, right), (right, given), (given, given)):
        scores = kernels.scores("float32", rows, queries, rows, contexts)
        assert scores.shape == (3, 3)


def test_no_sets(kernels: AttentionKernels) -> None:
    rows, none = np.zeros((0, 8), np.float32), np.zeros(1, np.int64)
    some = random_fragments([2, 0], 8, torch.float32)
    assert kernels.scores("float32", rows, none, array(some.values), some.offsets.numpy()).shape == (0, 2)
    assert kernels.scores("float32", array(some.values), some.offsets.numpy(), rows, none).shape == (2, 0)
    assert kernels.scores("float32", rows, np.zeros(4, np.int64), rows, np.zeros(3, np.int64)).tolist() == [[0, 0]] * 3
