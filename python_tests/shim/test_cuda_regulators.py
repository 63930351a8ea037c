"""The CUDA kernels of `regulated_scores` and `cross_attention_alignments` in the CPU shim, against the reference.

The kernels are compiled for the CPU and simulated; no GPU is involved (docs/internals/shim.md). The small tile of the
tests has 32 rows, 32 columns and chunks of 64 channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from itm_fast import Fragments, reference
from itm_fast.ops.library import FallbackWarning, use_native
from itm_fast.ops.regulators import CUDA_LONGEST, CUDA_STEPS, beyond_kernels
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.regulators import SETTINGS, hidden_widths, random_parameters
from python_tests.helpers.shim import compiled_driver
from python_tests.helpers.tolerance import assert_close_to_exact, max_error
from python_tests.shim.attention_checks import cancelling_contexts, long_cancelling_contexts
from python_tests.shim.regulator_checks import (
    check_alignments,
    check_low_parts,
    check_scores,
    double,
    result_of,
    single,
    weights_of,
)  # fmt: skip
from python_tests.shim.shim_attention import FOCAL_MODES, NORMALIZATIONS
from python_tests.shim.shim_regulators import RegulatorKernels, random_weights

pytestmark = pytest.mark.shim

# Two tiles of queries; query set 2 and context set 1 are empty.
QUERIES, CONTEXTS = [3, 1, 0, 12, 9, 9], [4, 0, 17, 1]
DIM, WIDTH = 70, 35  # two chunks and two blocks of outputs


@pytest.fixture(scope="module")
def kernels() -> RegulatorKernels:
    return RegulatorKernels(compiled_driver("regulators"))


@pytest.fixture(scope="module")
def truncating(tmp_path_factory: pytest.TempPathFactory) -> RegulatorKernels:
    """Tensor cores that cut sums off instead of rounding them."""
    return RegulatorKernels(compiled_driver("regulators", "-DITM_FAST_SHIM_TRUNCATES"))


def rcar(setting: str = "rcar2", dim: int = DIM, width: int = WIDTH) -> tuple[Fragments, Fragments, Any]:
    queries, contexts = random_fragments(QUERIES, dim), random_fragments(CONTEXTS, dim, seed=1)
    return queries, contexts, random_parameters(setting, dim, width)


def long_sets(side: str, setting: str, dim: int = DIM, width: int = WIDTH) -> tuple[Fragments, Fragments, Any]:
    queries = random_fragments([5, 0, 12, 9] if side == "contexts" else [66, 0, 70, 70], dim)
    contexts = random_fragments([30] if side == "queries" else [60, 72, 66], dim, seed=1)
    return queries, contexts, random_parameters(setting, dim, width)


def autocast_scores(*operands: Any) -> torch.Tensor:
    """Compute scores in plain PyTorch with its own bfloat16 products."""
    with torch.autocast("cpu", torch.bfloat16):
        return reference.regulated_scores_packed(*operands).float()


# Tests of scores and alignments


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting(kernels: RegulatorKernels, setting: str) -> None:
    """Includes dropout: a single wrong mask element would change a score by far more than rounding."""
    number = list(SETTINGS).index(setting)
    options: dict[str, Any] = {"temperature": 5.0, "focal": FOCAL_MODES[number % 3]}
    operands = rcar(setting)
    if operands[2].aggregations:
        options |= {"dropout": 0.4, "seed": (2**63 - 1, -(2**63), 5 + 2**40)[number % 3]}
    check_scores(kernels, *operands, name=setting, **options)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_alignments(kernels: RegulatorKernels, normalization: str) -> None:
    """Includes an empty context set, whose attended vector is zero."""
    number = NORMALIZATIONS.index(normalization)
    setting = ("rar1", "rcar2", "rcar2, residuals")[number % 3]
    options = {"normalization": normalization, "focal": FOCAL_MODES[number % 3], "temperature": 6.0}
    check_alignments(kernels, *rcar(setting), name=f"{normalization} {setting}", **options)


@settings(max_examples=15)
@given(st.data())
def test_ragged_sets_of_any_width(kernels: RegulatorKernels, data: st.DataObject) -> None:
    lengths = st.lists(st.sampled_from([0, 1, 2, 5, 13, 32]), min_size=1, max_size=4)
    dim, width = data.draw(st.sampled_from([1, 7, 16, 33, 65])), data.draw(st.sampled_from([2, 9, 33]))
    queries = random_fragments(data.draw(lengths), dim, seed=data.draw(st.integers(0, 9)))
    contexts = random_fragments(data.draw(lengths), dim, seed=data.draw(st.integers(0, 9)))
    parameters = random_parameters(data.draw(st.sampled_from(list(SETTINGS))), dim, width)
    check_scores(
        kernels,
        queries,
        contexts,
        parameters,
        temperature=data.draw(st.sampled_from([-3.0, 1.0, 4.0, 20.0])),
        negative_slope=data.draw(st.sampled_from([0.0, 0.1, 1.0])),
        dropout=data.draw(st.sampled_from([0.0, 0.4])) if parameters.aggregations else 0.0,
        seed=data.draw(st.integers(-(2**63), 2**63 - 1)),
        run={
            "wide_offsets": data.draw(st.booleans()),
            "blocks": data.draw(st.integers(1, 9)),
            "order": data.draw(st.integers(0, 2**31)),
        },
    )


def test_the_tile_of_the_launchers(kernels: RegulatorKernels) -> None:
    """112 x 128 with four stages and eight warps or 16, and more than one chunk of 512 channels."""
    queries, contexts = random_fragments([13, 40], 530), random_fragments([9], 530, seed=1)
    parameters = random_parameters("rcar2", 530, 20)
    check_scores(kernels, queries, contexts, parameters, run={"large": True})
    operands = single(queries, contexts, parameters)
    exact = reference.regulated_scores(*double(*operands))
    medium = result_of(kernels, *operands, "bf16", large=True)
    assert_close_to_exact(medium, autocast_scores(*operands), exact)
    assert max_error(medium, exact) > 1e-5


@pytest.mark.parametrize("focal", ["equal", "prob"])
def test_sets_that_fill_the_tile_of_the_launchers(kernels: RegulatorKernels, focal: str) -> None:
    """One set or several sets fill all 112 rows; each lane takes up to four of at most 128 contexts."""
    queries, contexts = random_fragments([112, 50, 62], 12), random_fragments([128, 97], 12, seed=1)
    parameters = random_parameters("rcar2", 12, 10)
    check_scores(kernels, queries, contexts, parameters, name=focal, focal=focal, run={"large": True})


@pytest.mark.parametrize("remainder", [1e-2, 1e-4, 0.0])
def test_contexts_that_cancel(kernels: RegulatorKernels, remainder: float) -> None:
    """The Gram matrix would lose the digits of the norms of attended vectors, so these are formed."""
    queries, parameters = random_fragments([3, 9], 24, seed=3), random_parameters("rar1", 24, 10)
    check_alignments(kernels, queries, cancelling_contexts(remainder), parameters, temperature=0.0)


@pytest.mark.parametrize("remainder", [0.9, 0.5, 0.3, 1e-4, 0.0])
def test_long_contexts_that_cancel(kernels: RegulatorKernels, remainder: float) -> None:
    """With 0.5 the Gram matrix just keeps enough digits, with 0.3 attended vectors are formed."""
    queries, parameters = random_fragments([35, 40], 130, seed=3), random_parameters("rar1", 130, 10)
    contexts = long_cancelling_contexts(remainder, 130)
    check_alignments(kernels, queries, contexts, parameters, temperature=0.0)


@pytest.mark.parametrize("focal", FOCAL_MODES)
def test_norms_from_gram_matrices_of_long_sets(kernels: RegulatorKernels, focal: str | None) -> None:
    """Sets of more rows than a product has columns, with more channels than rows."""
    queries, contexts = random_fragments([5, 0, 40, 40, 30], 130), random_fragments([60, 3, 72, 33], 130, seed=1)
    parameters = random_parameters("rcar2", 130, 12)
    run = {"longest": (queries.max_length, contexts.max_length)}
    check_scores(kernels, queries, contexts, parameters, run=run, focal=focal, temperature=5.0)


def test_gram_matrices_of_long_sets_in_the_tile_of_the_launchers(kernels: RegulatorKernels) -> None:
    queries, contexts = random_fragments([60, 60], 400), random_fragments([136], 400, seed=1)
    parameters = random_parameters("rcar2", 400, 12)
    assert kernels.slabs((2, 120, 1, 136, 400), weights_of(parameters), (60, 136), 3)[2] == 136
    check_scores(kernels, queries, contexts, parameters, run={"large": True, "longest": (60, 136)})


def test_gram_matrices_in_bfloat16_have_low_parts(kernels: RegulatorKernels) -> None:
    check_low_parts(kernels)


def test_long_sets_have_gram_matrices_where_they_save_work(kernels: RegulatorKernels) -> None:
    def width(query_rows: int, n_contexts: int, dim: int = 1024, setting: str = "rcar2") -> int:
        sizes = (64, query_rows, 64, 64 * n_contexts, dim)
        return kernels.slabs(sizes, weights_of(random_parameters(setting, 8, 6)), (64, n_contexts), 132)[2]

    assert [width(64 * 13, length) for length in (36, 128, 196, 576)] == [128, 128, 200, 576]
    assert [width(rows, 196) for rows in (13, 60, 65)] == [128, 128, 200], "few queries do not pay for a matrix"
    assert width(64 * 13, 576, dim=512) == 128
    assert width(64 * 13, 196, setting="scan") == width(64 * 13, 36, setting="scan") == 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_long_sets(kernels: RegulatorKernels, setting: str) -> None:
    """Sets that take up to three products, beside an empty and a short one."""
    number = list(SETTINGS).index(setting)
    operands = long_sets(("contexts", "queries", "both")[number % 3], setting)
    options: dict[str, Any] = {"temperature": 5.0, "focal": FOCAL_MODES[number // 3 % 3]}
    if operands[2].aggregations:
        options |= {"dropout": 0.4, "seed": number}
    check_scores(kernels, *operands, name=setting, **options)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_alignments_of_long_sets(kernels: RegulatorKernels, normalization: str) -> None:
    number = NORMALIZATIONS.index(normalization)
    options = {"normalization": normalization, "focal": FOCAL_MODES[number % 3], "temperature": 6.0}
    check_alignments(kernels, *long_sets("both", "rcar2", 20, 12), name=normalization, **options)


@pytest.mark.parametrize("side", ["queries", "contexts", "both"])
def test_long_sets_of_known_length_among_short_ones(kernels: RegulatorKernels, side: str) -> None:
    queries = random_fragments([3, 0, 9, 5, 12] if side == "contexts" else [3, 70, 9, 5, 12], 20)
    contexts = random_fragments([4, 17, 5] if side == "queries" else [4, 100, 5], 20, seed=1)
    run = {"longest": (queries.max_length, contexts.max_length)}
    check_scores(kernels, queries, contexts, random_parameters("rcar2", 20, 12), run=run, dropout=0.4, seed=3)


@pytest.mark.parametrize(("n_queries", "n_contexts"), [(9, 640), (512, 9)])
def test_the_longest_sets(kernels: RegulatorKernels, n_queries: int, n_contexts: int) -> None:
    queries, contexts = random_fragments([n_queries], 12), random_fragments([n_contexts], 12, seed=1)
    parameters = random_parameters("rcar2", 12, 10)
    check_scores(kernels, queries, contexts, parameters, focal="prob", run={"large": True})


@pytest.mark.parametrize("setting", ["rcr1", "rcar2", "rcar2, residuals"])
@pytest.mark.parametrize(("wide", "narrow"), [(0, 5), (5, 0), (0, 0), (45, 40)])
def test_hidden_layers_of_any_width(kernels: RegulatorKernels, setting: str, wide: int, narrow: int) -> None:
    """Without hidden units, the factors depend only on the biases."""
    queries, contexts, parameters = rcar(setting, 20, 12)
    check_scores(kernels, queries, contexts, hidden_widths(parameters, wide, narrow), name=setting)


# Tests of the precisions


@pytest.mark.parametrize(
    ("setting", "side", "dim"),
    [
        ("rcr1", None, DIM),
        ("rcar2", None, DIM),
        ("rcar2, paper", None, DIM),
        ("rcr1", "queries", DIM),
        ("rcar2", "contexts", DIM),
        ("rcar2", "both", 4 * DIM),
    ],
)
@pytest.mark.parametrize("cores", ["kernels", "truncating"])
def test_the_precisions(request: pytest.FixtureRequest, cores: str, setting: str, side: str | None, dim: int) -> None:
    """Products in two parts keep 16 bits; in bfloat16 errors are at most twice those of PyTorch's own autocast.

    With a side, its sets are long. With many channels, long contexts have Gram matrices in bfloat16, too.
    """
    kernels = request.getfixturevalue(cores)
    queries, contexts, parameters = single(*(rcar(setting, dim) if side is None else long_sets(side, setting, dim)))
    exact = reference.regulated_scores(*double(queries, contexts, parameters))
    high = result_of(kernels, queries, contexts, parameters, "bf16x3")
    medium = result_of(kernels, queries, contexts, parameters, "bf16")
    highest = result_of(kernels, queries, contexts, parameters)
    assert max_error(highest, exact) < max_error(high, exact) < 1e-4
    assert_close_to_exact(medium, autocast_scores(queries, contexts, parameters), exact)
    assert 1e-5 < max_error(medium, exact) < 2e-2


# Tests of order, workspace and launches


@pytest.mark.parametrize("kernel", ["float32", "bf16"])
def test_results_do_not_depend_on_order_and_number_of_blocks(kernels: RegulatorKernels, kernel: str) -> None:
    operands = rcar("rcar2", 20, 12)
    found = set()
    for order, blocks in ((0, 1), (1, 2), (2, 100)):
        scores = result_of(kernels, *operands, kernel, order=order, blocks=blocks, dropout=0.4, seed=3)
        found.add(scores.numpy().tobytes())
        assert kernels.launches == 2
    assert len(found) == 1


def test_a_score_does_not_depend_on_its_neighbours_without_dropout(kernels: RegulatorKernels) -> None:
    queries, contexts, parameters = rcar("rcar2", 20, 12)
    together = result_of(kernels, queries, contexts, parameters)
    for i in (0, 3, 5):
        for j in (0, 2):
            alone = [part.index_select(torch.tensor([n])) for part, n in ((queries, i), (contexts, j))]
            assert result_of(kernels, *alone, parameters).item() == together[i, j].item()


def test_a_block_needs_the_same_room_however_many_sets_and_channels_there_are(kernels: RegulatorKernels) -> None:
    found = []
    for copies, dim in ((1, 20), (3, 20), (1, 130)):
        queries, contexts = random_fragments([3] * copies, dim), random_fragments([4] * copies, dim)
        result_of(kernels, queries, contexts, random_parameters("rcar2", dim, 12))
        found.append(kernels.slab_bytes)
    assert len(set(found)) == 1


# Tests of non-finite values and invalid sets


@pytest.mark.parametrize("dim", [20, 130])
def test_a_nan_stays_in_its_pairs_of_long_sets(kernels: RegulatorKernels, dim: int) -> None:
    """With many channels in a Gram matrix, too."""
    queries, contexts, parameters = single(*long_sets("both", "rcar2", dim, 12))
    right = result_of(kernels, queries, contexts, parameters)
    values = contexts.values.clone()
    values[int(contexts.offsets[1]) + 50, 5] = float("nan")
    scores = result_of(kernels, queries, contexts.with_values(values), parameters)
    assert bool(scores[[0, 2, 3], 1].isnan().all())
    assert torch.equal(scores[:, [0, 2]], right[:, [0, 2]])
    assert scores[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kernel", ["float32", "bf16"])
def test_numbers_that_are_not_finite_stay_in_their_pairs(kernels: RegulatorKernels, kernel: str, bad: float) -> None:
    queries, contexts, parameters = single(*rcar("rcar2", 20, 12))
    right = result_of(kernels, queries, contexts, parameters, kernel)
    values, others = queries.values.clone(), contexts.values.clone()
    values[int(queries.offsets[4]) + 2, 3] = bad
    others[int(contexts.offsets[2]) + 10, 5] = bad
    queries, contexts = queries.with_values(values), contexts.with_values(others)
    exact = reference.regulated_scores(queries, contexts, parameters)
    scores = result_of(kernels, queries, contexts, parameters, kernel)
    assert torch.equal(scores.isnan(), exact.isnan())
    assert bool(exact[4, [0, 2, 3]].isnan().all())
    assert torch.equal(scores[exact.isfinite()], right[exact.isfinite()])


def test_zero_vectors_are_as_in_the_reference(kernels: RegulatorKernels) -> None:
    queries, contexts, parameters = rcar()
    queries = queries.with_values(queries.values * (torch.arange(sum(QUERIES)) % 3 > 0)[:, None])
    contexts = contexts.with_values(contexts.values * (torch.arange(sum(CONTEXTS)) % 5 > 0)[:, None])
    exact = reference.regulated_scores(queries, contexts, parameters)
    assert max_error(result_of(kernels, queries, contexts, parameters), exact) < 1e-5


@pytest.mark.parametrize("lengths", [(3, 33, 4), (40, 66, 34)])
@pytest.mark.parametrize("longest", [(0, 0), (5, 1)])
def test_longer_sets_than_the_kernel_takes_are_nan(
    kernels: RegulatorKernels, lengths: tuple[int, int, int], longest: tuple[int, int]
) -> None:
    """Callers that know the lengths never see these NaN; pairs of other sets do not change."""
    if longest == (5, 1):
        lengths = (9, 33, 31)  # With a known length that is too short, a slab has the rows of a tile.
    queries, contexts = random_fragments(lengths, 9), random_fragments(lengths, 9, seed=1)
    for setting, aligns in (("rcar2", False), ("rcr1, mean", True)):
        parameters = random_parameters(setting, 9, 6)
        found = result_of(kernels, queries, contexts, parameters, aligns=aligns, longest=longest)
        short = [part.index_select(torch.tensor([0, 2])) for part in (queries, contexts)]
        right = result_of(kernels, *short, parameters, aligns=aligns)
        if aligns:
            is_long = queries.set_index() == 1
            assert bool(found[:, is_long].isnan().all() and found[1].isnan().all())
            assert torch.equal(found[[0, 2]][:, ~is_long], right)
        else:
            assert found.isnan().tolist() == [[False, True, False], [True] * 3, [False, True, False]]
            assert torch.equal(found[[0, 2]][:, [0, 2]], right)


@pytest.mark.parametrize(
    "offsets",
    [[0, 900, 3, 10], [0, -5, 20, 10], [0, 4, 4, -(2**40)], [7, 2, 9, 10], [0, 2**40, 2**41, 2**42], [0, 0, 60, 61]],
)
def test_offsets_that_cannot_be_lead_nowhere(kernels: RegulatorKernels, offsets: list[int]) -> None:
    """Nothing checks offsets before a launch on a GPU, so the kernels must not read outside the values."""
    rows = random_fragments([10], 8, torch.float32).values.numpy()
    weights = random_weights(np.random.default_rng(0), 8, 6, 2, 1, 2, scored=1, interleaved=1)
    given, right = np.array(offsets), np.array([0, 4, 6, 10])
    for queries, contexts in ((given, right), (right, given), (given, given)):
        assert kernels.run("float32", rows, queries, rows, contexts, weights).shape == (3, 3)
        assert kernels.run("float32", rows, queries, rows, contexts, weights, aligns=True).shape == (3, 10, 6)


def test_empty_sets_score_zero(kernels: RegulatorKernels) -> None:
    queries, contexts = random_fragments([0, 2, 0], 8), random_fragments([0, 3], 8)
    for setting in ("rcar2", "rcr1", "scan"):
        scores = result_of(kernels, queries, contexts, random_parameters(setting, 8, 6))
        assert scores[[0, 2]].tolist() == [[0, 0], [0, 0]]
        assert scores[1, 0].item() == 0
        assert scores[1, 1].item() != 0
    none = random_fragments([0, 0], 8)
    assert result_of(kernels, none, none, random_parameters("rcar2", 8, 6)).tolist() == [[0, 0], [0, 0]]


# Tests of the limits that operators check before a launch


@pytest.mark.parametrize(
    ("n_rows", "n_sets", "longest", "right"),
    [
        (0, 0, 0, [112, 128]),
        (0, 0, 300, [112, 128]),
        (5, 0, 0, [112, 128]),
        (224, 2, 0, [112, 128]),
        (256, 2, 0, [160, 128]),
        (257, 2, 0, [168, 168]),
        (196 * 64, 64, 0, [248, 248]),
        (196 * 64, 64, 196, [200, 200]),
        (576, 1, 0, [512, 640]),
        (36 * 64, 64, 112, [112, 128]),
        (36 * 64, 64, 128, [128, 128]),
        (36 * 64, 64, 300, [304, 304]),
        (36 * 64, 64, 2**40, [512, 640]),
    ],
)
def test_the_rows_of_a_slab(
    kernels: RegulatorKernels, n_rows: int, n_sets: int, longest: int, right: list[int]
) -> None:
    """Without the length of the longest set, a quarter more than the average."""
    assert kernels.limits(n_rows, n_sets, longest) == [*right, 8]


def test_the_limits_are_those_of_the_kernels(kernels: RegulatorKernels) -> None:
    longest = max(CUDA_LONGEST)
    assert kernels.limits(longest, 1, longest) == [*CUDA_LONGEST, CUDA_STEPS]


def test_long_slabs_take_fewer_blocks(kernels: RegulatorKernels) -> None:
    """The slabs take at most 520 MB, or that of one block."""
    short, sizes = (13, 36), (128, 128 * 13, 128, 128 * 36, 1024)
    weights = random_weights(np.random.default_rng(0), 8, 256, 2, 1, 2, scored=1)
    taken = {longest: kernels.slabs(sizes, weights, longest, 132) for longest in (short, (300, 36), (512, 640))}
    assert [blocks for blocks, *_ in taken.values()] == [132, 132, 101]
    assert 101 * taken[512, 640][1] <= 520e6 < 102 * taken[512, 640][1]
    wide = random_weights(np.random.default_rng(0), 8, 65_536, 1, 0, 0)
    assert kernels.slabs((1, 512, 1, 640, 8), wide, (512, 640), 132)[0] == 1
    assert kernels.slabs(sizes, weights, short, 0)[0] == 1


def test_what_the_kernels_do_not_take_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, deep = (random_parameters(setting, 4, 6) for setting in ("rcar2", "rar1"))
    deep = deep.with_tensors(deep.tensors())
    deep.aggregations *= 9
    queries, contexts = random_fragments([112], 4), random_fragments([128], 4)
    longer, wider = random_fragments([512, 1, 1], 4), random_fragments([640, 1, 1], 4)
    longest, widest = random_fragments([513], 4), random_fragments([641], 4)
    assert beyond_kernels("cuda", queries, contexts, parameters) is None
    assert beyond_kernels("cuda", longer, wider, parameters) is None
    assert [beyond_kernels("cpu", longest, widest, steps) for steps in (parameters, deep)] == [None, None]
    start = "the CUDA kernels of the regulators support "
    assert beyond_kernels("cuda", longest, contexts, parameters) == start + "query sets of at most 512 rows"
    assert beyond_kernels("cuda", queries, widest, parameters) == start + "context sets of at most 640 rows"
    assert beyond_kernels("cuda", queries, contexts, deep) == start + "at most 8 steps"
    empty = Fragments(torch.zeros(112, 0), queries.offsets)
    assert beyond_kernels("cuda", empty, contexts, parameters) == start + "rows of at least one component"
    with pytest.warns(FallbackWarning, match=r"^itm_fast runs on the packed reference: as tested$"):
        assert not use_native("regulated_scores", queries.values, "as tested")
    assert use_native("regulated_scores", queries.values)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    unknown = Fragments(contexts.values, contexts.offsets)
    reason = "under torch.compile the CUDA kernels of the regulators need Fragments made with max_length"
    assert beyond_kernels("cuda", queries, unknown, parameters) == reason
    assert beyond_kernels("cuda", queries, contexts, parameters) is None
