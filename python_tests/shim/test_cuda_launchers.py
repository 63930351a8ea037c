"""The launchers of csrc/cuda on the CPU: their checks, results, workspaces and grids; the kernels run in the shim.

Python takes the same path as on a GPU (`helpers/stand_in.py`). Only streams and calls of CUDA itself are left out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import check_cuda_library
import pytest
import torch

import itm_fast.functional as F_itm
from python_tests.cuda.test_launches import AT_MOST
from python_tests.helpers.devices import CASES, Case, inputs_of, run_case
from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.processes import ROOT
from python_tests.helpers.regulators import random_parameters
from python_tests.helpers.stand_in import stand_in
from python_tests.helpers.triplet_cases import random_scores
from python_tests.operators.test_devices import check_numbers
from python_tests.operators.test_matching_loss import SIZE, assert_same, in_separate_calls, results, sides
from python_tests.shim.launchers import compile_launchers, on_the_shim

pytestmark = pytest.mark.shim
# Many slices, long sets, wide layers and one more step take seconds in the shim and add no launcher code.
TOO_SLOW = (
    "cross_attention_scores wide",
    "cross_attention_scores long sets",
    "regulated_scores of RAR alone, wide",
    "regulated_scores of RCR alone",
)
DRIVEN = [case for case in CASES if case.name not in TOO_SLOW]
# Dtype handling of a launcher does not depend on the options: only the first case of an operator runs in all dtypes.
IN_ALL_DTYPES = {case.operators[0]: case.name for case in reversed(DRIVEN)}.values()
OPERATORS = torch.ops.itm_fast
ANCHOR = random_scores(SIZE, dtype=torch.float32)
MATCHING: list[dict[str, Any]] = [
    {"mining": "hardest"},
    {"mining": "selective", "attention": "i2t", "positives": random_scores(SIZE, seed=3) > 0.6, "reduction": "mean"},
    {"loss": "boosting", "anchor_scores": ANCHOR.t(), "strategy": "both", "mining": "all"},
    {"attention": "sum", "other_direction": {"temperature": 4.0, "normalization": "softmax", "focal": "equal"}},
    {"attention": "mean", "loss": "boosting", "anchor_scores": ANCHOR, "other_direction": {"aggregation": "sum"}},
]


@pytest.fixture(scope="module", autouse=True)
def counters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], int]]:
    """Load the launchers; return functions that count their launches and their fills with zeros so far."""
    library = compile_launchers(tmp_path_factory.mktemp("launchers"))
    torch.ops.load_library(library)
    functions = {name: getattr(ctypes.CDLL(str(library)), f"itm_fast_{name}") for name in ("launches", "fills")}
    for count in functions.values():
        count.restype = ctypes.c_int64
    return functions


@pytest.fixture
def launches(counters: dict[str, Callable[[], int]]) -> Callable[[], int]:
    return counters["launches"]


@pytest.mark.parametrize("case", DRIVEN, ids=lambda case: case.name)
def test_numbers_gradients_and_launches(case: Case, launches: Callable[[], int]) -> None:
    for number, dtype in enumerate(case.dtypes if case.name in IN_ALL_DTYPES else case.dtypes[:1]):
        size = 4 if number == 0 and not case.widened else 1
        inputs = inputs_of(case, number, size, dtype, "cpu")
        with stand_in(), on_the_shim() as calls:
            before = launches()
            found = run_case(F_itm, case, inputs)
            assert 1 <= launches() - before <= sum(AT_MOST[name] * times for name, times in calls.items())
        assert set(calls) == set(case.operators)
        check_numbers(case, number, size, dtype, "cpu", found)


def test_every_launcher_runs() -> None:
    driven = {name for case in DRIVEN for name in case.operators}
    assert driven == check_cuda_library.implemented(ROOT / "csrc/cuda")


def check_as_on_the_cpu(operator: Callable[..., Any], *arguments: Any) -> None:
    right = operator(*arguments)
    with on_the_shim():
        found = operator(*arguments)
    for one, other in zip(*((part if isinstance(part, tuple) else (part,)) for part in (found, right)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


TRIPLET = (0.2, "hardest", 0.0, "batch", False, "both")
ATTENTION = (9.0, "clipped_l2norm", 0.1, "none", "mean", 6.0, "float32")
MAXSIM = ("mean", "both", "float32")
# Operators of torch that do no work on the device themselves. "to" and "contiguous" call "copy_" if they must copy.
ALLOCATIONS = {"aten::empty", "aten::new_empty", "aten::empty_strided"}
VIEWS = {"aten::t", "aten::transpose", "aten::as_strided", "aten::detach", "aten::to", "aten::contiguous"}


@pytest.mark.parametrize(
    "lengths", [([], []), ([0, 2], [3, 0]), ([3] * 9, [2] * 9), ([20] * 8, [4] * 8), ([9, 3], [200])]
)
def test_the_backward_of_the_regulators_takes_two_launches(
    lengths: tuple[list[int], list[int]], launches: Callable[[], int]
) -> None:
    """However many pairs there are; with a gradient for every pair, or for every number of the alignments."""
    sides = [random_fragments(of, 8, torch.float32, seed=i) for i, of in enumerate(lengths)]
    operands = (sides[0].values, sides[0].offsets, sides[1].values, sides[1].offsets)
    parameters = random_parameters("rcar2", 8, 6, torch.float32)
    chain = [tensor for group in (*parameters.alignments, *parameters.correspondences) for tensor in group]
    setting = (2, 1, 2, True, False, "sigmoid", False, True, True, "interleaved", True, False, "alignment")
    attention, shape = (4.0, 0.1, "none"), (len(sides[0]), len(sides[1]))
    for operator, gradient, weights, rest in (
        ("regulated_scores", torch.ones(shape), parameters.tensors(), (*setting, *attention, 0.0, None, "float32")),
        (
            "cross_attention_alignments",
            torch.ones(shape[1], len(sides[0].values), 6),
            chain,
            (1, True, 4.0, "clipped_l2norm", *attention[1:], "float32"),
        ),
    ):
        backward = getattr(OPERATORS, f"{operator}_backward")
        right = backward(gradient, *operands, weights, *rest)
        with on_the_shim():
            before = launches()
            found = backward(gradient, *operands, weights, *rest)
            assert launches() - before == 2
        for own, other in zip(found, right, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mining", ["hardest", "all"])
def test_nothing_is_launched_as_a_grid_of_no_blocks(mining: str) -> None:
    nothing, options = torch.zeros(0, 0), (0.2, mining, 0.0, "batch", False, "both")
    negatives = torch.zeros(2, 0, dtype=torch.int64)
    for reduction in ("sum", "mean"):
        check_as_on_the_cpu(OPERATORS.triplet_loss, nothing, None, None, *options, reduction)
        arguments = (torch.tensor(1.0), nothing, None, None, negatives, *options, reduction)
        check_as_on_the_cpu(OPERATORS.triplet_loss_backward, *arguments)
    check_as_on_the_cpu(OPERATORS.hardest_negatives, nothing, None)
    for n_images in (3, 0):  # Captions need images: each caption names one.
        of_captions = torch.zeros(0, dtype=torch.int64)
        check_as_on_the_cpu(OPERATORS.retrieval_ranks, torch.zeros(n_images, 0), of_captions, True)


@pytest.mark.parametrize("lengths", [([], [2, 3]), ([2, 3], []), ([], []), ([0, 0], [0]), ([0, 2], [3, 0])])
def test_sets_without_rows_and_no_sets(lengths: tuple[list[int], list[int]]) -> None:
    queries, contexts = (random_fragments(of, 8, torch.float32, seed=i) for i, of in enumerate(lengths))
    operands = (queries.values, queries.offsets, contexts.values, contexts.offsets)
    check_as_on_the_cpu(OPERATORS.cross_attention_scores, *operands, *ATTENTION)
    check_as_on_the_cpu(OPERATORS.maxsim_scores, *operands, None, *MAXSIM)
    gradient = torch.ones(len(queries), len(contexts))
    for asked in ((True, True), (False, True), (True, False), (False, False)):
        check_as_on_the_cpu(OPERATORS.cross_attention_scores_backward, gradient, *operands, *ATTENTION, *asked)
        check_as_on_the_cpu(OPERATORS.maxsim_scores_backward, gradient, *operands, None, *MAXSIM, 3, 3, *asked)


@pytest.mark.parametrize("options", MATCHING, ids=str)
def test_scores_and_loss_together_have_the_bits_of_separate_launches(
    options: dict[str, Any], launches: Callable[[], int]
) -> None:
    found, counted = [], []
    for function in (F_itm.matching_loss, in_separate_calls):
        words, regions = sides()
        with stand_in(), on_the_shim():
            before = launches()
            found.append(results(function, words, regions, **options))
            counted.append(launches() - before)
    assert_same(*found)
    # Both backwards scale the gradient; then, for each direction, they list the pairs and compute the gradients.
    directions = 2 if options.get("attention") in ("sum", "mean") else 1
    of_backward = 1 + 2 * directions
    assert counted == [2 + of_backward, 2 * directions + 1 + of_backward]


@pytest.mark.parametrize("attention", ["t2i", "i2t"])
def test_a_step_has_five_launches_and_two_fills(
    attention: str, counters: dict[str, Callable[[], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the scores of either direction; PyTorch adds no work on the device, such as copies."""
    operands = dict(zip(("t2i", "i2t"), (sides(), sides()[::-1]), strict=True))[attention]
    incoming = torch.tensor(2.0)
    with stand_in(), on_the_shim():
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        before = {name: count() for name, count in counters.items()}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss, _ = F_itm.matching_loss(*operands, attention=attention)
            torch.autograd.grad(loss, [side.values for side in operands], incoming)
    assert {name: count() - before[name] for name, count in counters.items()} == {"launches": 5, "fills": 2}
    of_torch = {event.name for event in profile.events() if event.name.startswith("aten::")}
    assert of_torch <= ALLOCATIONS | VIEWS


def test_scores_and_loss_of_no_pairs_and_of_too_many() -> None:
    options = (0.2, "hardest", 0.0, "batch", False, "absolute", 0.5, False, "both", "sum")
    nothing = (torch.zeros(0, 8), torch.zeros(1, dtype=torch.int64)) * 2
    scoring = (*ATTENTION, *ATTENTION[:-1])
    for attention in ("t2i", "sum"):
        check_as_on_the_cpu(OPERATORS.matching_loss, *nothing, None, None, attention, *scoring, *options)
    many = (torch.zeros(0, 8), torch.zeros(8194, dtype=torch.int64)) * 2
    with on_the_shim(), pytest.raises(RuntimeError, match="at most 8192 rows and columns for a gradient beside"):
        OPERATORS.matching_loss(*many, None, None, "t2i", *scoring, *options)


def test_maxsim_scores_without_pairs_and_of_pairs_of_no_sets(launches: Callable[[], int]) -> None:
    side = (torch.ones(2, 8), torch.tensor([0, 2]))
    no_sets, none = (torch.ones(0, 8), torch.tensor([0])), torch.zeros(0, 2, dtype=torch.int64)
    with on_the_shim():
        before = launches()
        assert OPERATORS.maxsim_scores(*side, *side, none, *MAXSIM).shape == (0,)
        assert OPERATORS.maxsim_scores(*side, *no_sets, torch.tensor([[0, 3]]), *MAXSIM).tolist() == [0.0]
        assert launches() == before
        for found in OPERATORS.maxsim_scores_backward(torch.ones(0), *side, *side, none, *MAXSIM, 2, 2, True, True):
            assert found.tolist() == torch.zeros(2, 8).tolist()
        assert launches() == before + 1
        OPERATORS.maxsim_scores(*side, *side, None, *MAXSIM)
        OPERATORS.maxsim_scores_backward(torch.ones(1, 1), *side, *side, None, *MAXSIM, 2, 2, True, True)
        assert launches() == before + 1 + 2 + 3
        with pytest.raises(RuntimeError, match="queries: the CUDA kernels take float32, bfloat16 or float16 rows, got"):
            OPERATORS.maxsim_scores(side[0].double(), side[1], side[0].double(), side[1], None, *MAXSIM)


def test_rows_too_wide_for_32_bit_places_are_refused() -> None:
    rows, offsets = torch.zeros(1, 2**24 + 8, dtype=torch.float16), torch.tensor([0, 1])
    with on_the_shim(), pytest.raises(RuntimeError, match="rows of at most 16777216 numbers, got 16777224"):
        OPERATORS.cross_attention_scores(rows, offsets, rows, offsets, *ATTENTION)


@pytest.mark.parametrize("longest", [(0, 0), (3, 150), (1, 1), (2**62, -1)])
def test_lengths_of_the_longest_sets(longest: tuple[int, int], launches: Callable[[], int]) -> None:
    """Also if they are wrong. Tensor cores round float32 rows to bfloat16 here, the ordinary units do not."""
    queries, contexts = random_fragments([3, 2], 8, torch.float32), random_fragments([4, 150, 5], 8, torch.float32, 1)
    operands = (queries.values, queries.offsets, contexts.values, contexts.offsets)
    check_as_on_the_cpu(OPERATORS.cross_attention_scores, *operands, *ATTENTION, *longest)
    gradient = torch.ones(2, 3)
    check_as_on_the_cpu(
        OPERATORS.cross_attention_scores_backward, gradient, *operands, *ATTENTION, True, True, *longest
    )
    in_bf16 = (*operands, *ATTENTION[:-1], "bf16")
    with on_the_shim():
        before = launches()
        unknown, known = (OPERATORS.cross_attention_scores(*in_bf16, *given) for given in ((), longest))
        assert launches() - before == 4
    assert torch.equal(unknown[:, [0, 2]], known[:, [0, 2]])
    assert torch.equal(unknown[:, 1], known[:, 1]) == (longest != (3, 150))


@pytest.mark.parametrize("longest", [(3, 150), (1, 1)])
def test_the_regulators_take_long_sets_of_known_length_alone(longest: tuple[int, int]) -> None:
    queries, contexts = random_fragments([3], 8, torch.float32), random_fragments([4, 150, 5], 8, torch.float32, 1)
    operands = (queries.values, queries.offsets, contexts.values, contexts.offsets)
    parameters = random_parameters("rcar2", 8, 6, torch.float32)
    setting = (2, 1, 2, True, False, "sigmoid", False, True, True, "interleaved", True, False, "alignment")
    rest = (*setting, 4.0, 0.1, "none", 0.0, None, "float32", *longest)
    chain = [tensor for group in (*parameters.alignments, *parameters.correspondences) for tensor in group]
    aligning = (1, True, 4.0, "clipped_l2norm", 0.1, "none", "float32", *longest)
    gradients = torch.ones(1, 3), torch.ones(3, 3, 6)
    for name, gradient, arguments in (
        ("regulated_scores", gradients[0], (*operands, parameters.tensors(), *rest)),
        ("cross_attention_alignments", gradients[1], (*operands, chain, *aligning)),
    ):
        forward, backward = (getattr(OPERATORS, operator) for operator in (name, f"{name}_backward"))
        right = forward(*arguments), *backward(gradient, *arguments)[:3]
        with on_the_shim():
            found = forward(*arguments), *backward(gradient, *arguments)[:3]
        if longest == (3, 150):
            for own, other in zip(found, right, strict=True):
                torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
            continue
        contexts_first = found[0] if name == "cross_attention_alignments" else found[0].t()
        assert bool(contexts_first[1].isnan().all() and contexts_first[[0, 2]].isfinite().all())
        assert all(bool(part.isnan().all()) for part in found[1:])


def test_operands_that_are_not_dense_and_small_offsets() -> None:
    sides = [random_fragments([2, 5, 1], 16, torch.float32, seed=seed) for seed in (0, 1)]
    operands: list[torch.Tensor] = []
    for side in sides:
        operands += [side.values.repeat_interleave(2, dim=1)[:, ::2], side.offsets.int().repeat_interleave(2)[::2]]
    assert [part.is_contiguous() for part in operands] == [False] * 4
    check_as_on_the_cpu(OPERATORS.cross_attention_scores, *operands, *ATTENTION)
    gradient = random_scores(3, dtype=torch.float32).t()
    for incoming in (gradient, gradient.double(), gradient.bfloat16(), gradient[:, :1].expand(3, 3)):
        check_as_on_the_cpu(OPERATORS.cross_attention_scores_backward, incoming, *operands, *ATTENTION, True, True)
    pairs = torch.tensor([[0, 2, 1], [1, 1, 0]]).t()
    for listed, incoming in ((None, gradient), (pairs, gradient[0])):
        check_as_on_the_cpu(OPERATORS.maxsim_scores, *operands, listed, *MAXSIM)
        check_as_on_the_cpu(OPERATORS.maxsim_scores_backward, incoming, *operands, listed, *MAXSIM, 5, 5, True, True)
    scores = random_scores(20, dtype=torch.float32).t()
    positives = (random_scores(20, dtype=torch.float32, seed=1) > 1).t()
    check_as_on_the_cpu(OPERATORS.triplet_loss, scores, positives, None, *TRIPLET, "none")
    loss, negatives = OPERATORS.triplet_loss(scores, positives, None, *TRIPLET, "none")
    arguments = (loss.t().contiguous().t(), scores, positives, None, negatives, *TRIPLET, "none")
    check_as_on_the_cpu(OPERATORS.triplet_loss_backward, *arguments)
    check_as_on_the_cpu(OPERATORS.retrieval_ranks, scores, torch.arange(40)[::2] // 2, False)
