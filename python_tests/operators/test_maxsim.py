"""`maxsim_scores`: values and gradients of the reference, the packed form and the native kernels."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.ops import maxsim
from itm_fast.ops.maxsim import DIRECTIONS, REDUCTIONS, SIMILARITIES
from python_tests.helpers.fragments import native_calls, random_fragments, tied_fragments

pytestmark = pytest.mark.native

IMPLEMENTATIONS = {
    "reference": reference.maxsim_scores,
    "packed": lambda *args, **kwargs: reference.maxsim_scores_packed(*args, block_elements=500, **kwargs),
    "native": F_itm.maxsim_scores,
}
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_option = [
    pytest.mark.parametrize("similarity", SIMILARITIES),
    pytest.mark.parametrize("reduction", REDUCTIONS),
    pytest.mark.parametrize("direction", DIRECTIONS),
]


def with_options(test):
    for mark in every_option:
        test = mark(test)
    return test


def score_by_hand(query: list, context: list, similarity: str, reduction: str, direction: str) -> float:
    """Compute the score of one pair in plain Python."""
    if not query or not context:
        return 0.0

    def product(q: list[float], x: list[float]) -> float:
        norms = (math.hypot(*q) + 1e-8) * (math.hypot(*x) + 1e-8) if similarity == "cosine" else 1.0
        return sum(a * b for a, b in zip(q, x, strict=True)) / norms

    total = 0.0
    for name, own, other in (("queries", query, context), ("contexts", context, query)):
        if direction in (name, "both"):
            best = sum(max(product(a, b) for b in other) for a in own)
            total += best / len(own) if reduction == "mean" else best
    return total


def with_gradients(function, queries: Fragments, contexts: Fragments, weights: torch.Tensor, **options):
    """Return the scores and the gradients of `sum(weights * scores)`."""
    q, c = (part.values.detach().clone().requires_grad_() for part in (queries, contexts))
    scores = function(queries.with_values(q), contexts.with_values(c), **options)
    gradients = torch.autograd.grad((scores * weights).sum(), (q, c))
    return scores.detach(), *gradients


@every_implementation
@with_options
def test_values_by_hand(implementation: str, similarity: str, reduction: str, direction: str) -> None:
    queries = random_fragments([3, 0, 1, 40], 6, seed=1, normalized=False)
    contexts = random_fragments([2, 300, 0, 7], 6, seed=2, normalized=False)
    options = {"similarity": similarity, "reduction": reduction, "direction": direction}
    expected = torch.tensor(
        [[score_by_hand(queries[i].tolist(), contexts[j].tolist(), **options) for j in range(4)] for i in range(4)],
        dtype=torch.float64,
    )
    scores = IMPLEMENTATIONS[implementation](queries, contexts, **options)
    assert scores.dtype == torch.float64
    assert torch.allclose(scores, expected, rtol=1e-12, atol=1e-12)
    pairs = torch.tensor([[3, 1], [0, 0], [1, 1], [3, 2], [0, 0], [2, 3]])
    listed = IMPLEMENTATIONS[implementation](queries, contexts, pairs=pairs, **options)
    assert torch.allclose(listed, expected[pairs[:, 0], pairs[:, 1]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("listed", [False, True])
@with_options
def test_gradients(similarity: str, reduction: str, direction: str, listed: bool) -> None:
    """Native gradients match finite differences and those of both plain forms."""
    queries = random_fragments([2, 0, 5], 3, seed=3, normalized=False)
    contexts = random_fragments([3, 1, 0, 20], 3, seed=4, normalized=False)
    options = {"similarity": similarity, "reduction": reduction, "direction": direction}
    weights = torch.tensor([[1.0, -2.0, 1.0, 0.5], [3.0, 1.0, 2.0, 1.0], [0.5, -1.0, 2.0, 0.0]], dtype=torch.float64)
    if listed:
        options["pairs"] = torch.tensor([[2, 3], [0, 1], [2, 3], [1, 0], [0, 2]])
        weights = weights[0].repeat(2)[:5]

    def scores(q: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return F_itm.maxsim_scores(queries.with_values(q), contexts.with_values(c), **options)

    inputs = (queries.values.clone().requires_grad_(), contexts.values.clone().requires_grad_())
    assert torch.autograd.gradcheck(scores, inputs, eps=1e-6, atol=1e-6)
    native = with_gradients(F_itm.maxsim_scores, queries, contexts, weights, **options)
    for name in ("reference", "packed"):
        other = with_gradients(IMPLEMENTATIONS[name], queries, contexts, weights, **options)
        for a, b in zip(native, other, strict=True):
            assert torch.allclose(a, b, atol=1e-12)


@every_implementation
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ties_take_the_first_row(implementation: str, direction: str) -> None:
    queries, contexts = tied_fragments([5, 20], 2, seed=1), tied_fragments([30, 200], 2, seed=2)
    weights = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)
    _, *actual = with_gradients(IMPLEMENTATIONS[implementation], queries, contexts, weights, direction=direction)
    expected = [torch.zeros_like(side.values) for side in (queries, contexts)]

    def add(own: int, sides: tuple[Fragments, Fragments], sets: tuple[int, int], weight: torch.Tensor) -> None:
        """Add the gradient of the best partners of the rows of side `own`."""
        other = 1 - own
        starts = [int(sides[side].offsets[sets[side]]) for side in range(2)]
        for number, row in enumerate(sides[own][sets[own]]):
            products = (sides[other][sets[other]] @ row).tolist()
            best = products.index(max(products))
            expected[own][starts[own] + number] += weight * sides[other].values[starts[other] + best]
            expected[other][starts[other] + best] += weight * row

    for sets in itertools.product(range(2), range(2)):
        for own, name in enumerate(("queries", "contexts")):
            if direction in (name, "both"):
                add(own, (queries, contexts), sets, weights[sets])
    for found, right in zip(actual, expected, strict=True):
        assert torch.equal(found, right)


@every_implementation
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nan_stays_in_its_pairs(implementation: str, direction: str) -> None:
    queries, contexts = random_fragments([3, 4], 5, seed=5), random_fragments([200, 3], 5, seed=6)
    contexts.values[17, 2] = math.nan
    scores = IMPLEMENTATIONS[implementation](queries, contexts, direction=direction)
    assert bool(scores[:, 0].isnan().all())
    assert bool(scores[:, 1].isfinite().all())


@every_implementation
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinities(implementation: str, direction: str, value: float) -> None:
    queries = Fragments(torch.tensor([[1.0, 2.0], [3.0, 1.0], [2.0, 2.0]]).double(), torch.tensor([0, 2, 3]))
    rows = [[1.0, 1.0], [value, value], [2.0, 1.0], [value, value], [value, value]]
    contexts = Fragments(torch.tensor(rows).double(), torch.tensor([0, 3, 5]))
    weights = torch.ones(2, 2).double()
    scores, *gradients = with_gradients(
        IMPLEMENTATIONS[implementation], queries, contexts, weights, direction=direction
    )
    finite = direction == "queries" and value < 0
    assert scores.tolist() == [[4.0 + 7.0 if finite else value, value], [6.0 if finite else value, value]]
    if direction == "queries" and implementation == "native":  # Plain PyTorch multiplies infinities by 0.
        best = 1 if value > 0 else 2
        assert torch.equal(gradients[0], (contexts.values[best] + contexts.values[3]).expand(3, 2))
        assert bool((gradients[1][4] == 0).all())


def test_zero_rows_and_pairs_without_a_gradient_receive_none() -> None:
    queries, contexts = random_fragments([3, 2], 4), random_fragments([2, 6], 4, seed=1)
    queries.values[1] = 0
    contexts.values[3] = 0
    weights = torch.tensor([[0.0, math.nan], [0.0, 0.0]], dtype=torch.float64)
    for similarity in SIMILARITIES:
        options = {"direction": "both", "similarity": similarity}
        scores, for_queries, for_contexts = with_gradients(
            F_itm.maxsim_scores, queries, contexts, weights.nan_to_num(1.0), **options
        )
        assert bool(scores.isfinite().all())
        assert bool((for_queries[[1, 3, 4]] == 0).all())
        assert bool((for_contexts[[0, 1, 3]] == 0).all())
    q = queries.values.requires_grad_()
    F_itm.maxsim_scores(queries.with_values(q), contexts, direction="both").backward(weights)
    assert bool(q.grad[[0, 2]].isnan().all())
    assert bool((q.grad[3:] == 0).all())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_dtypes(dtype: torch.dtype, tolerance: float, similarity: str) -> None:
    """Scores are float32 and close to those of the same rows in float64; gradients have the dtype of the rows."""
    queries, contexts = random_fragments([9, 33], 70, dtype), random_fragments([150, 20, 1], 70, dtype, seed=1)
    weights = torch.ones(2, 3)
    options = {"similarity": similarity, "direction": "both", "reduction": "mean"}
    actual = with_gradients(F_itm.maxsim_scores, queries, contexts, weights, **options)
    wide = [part.to(torch.float64) for part in (queries, contexts)]
    exact = with_gradients(reference.maxsim_scores, *wide, weights.double(), **options)
    assert [part.dtype for part in actual] == [torch.float32, dtype, dtype]
    for found, expected in zip(actual, exact, strict=True):
        assert torch.allclose(found.double(), expected, atol=tolerance, rtol=tolerance)


def test_sets_with_more_rows_than_16_bits_count() -> None:
    queries, contexts = random_fragments([2], 2), random_fragments([3, 70_000], 2, seed=1)
    contexts.values[66_000] = queries.values.sum(dim=0) * 5
    weights = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    found = with_gradients(F_itm.maxsim_scores, queries, contexts, weights, direction="both")
    right = with_gradients(reference.maxsim_scores, queries, contexts, weights, direction="both")
    assert all(torch.allclose(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("listed", [False, True])
def test_the_number_of_threads_changes_no_bit(listed: bool) -> None:
    queries = random_fragments([5, 300, 0, 17, 40], 33, torch.float32)
    contexts = random_fragments([1300, 3, 0, 150, 36, 7], 33, torch.float32, seed=1)
    weights = torch.randn(30, generator=torch.Generator().manual_seed(2))
    options = {"direction": "both"}
    if listed:  # In no order, and with repetitions.
        draw = torch.randint(30, (30,), generator=torch.Generator().manual_seed(3))
        options["pairs"] = torch.stack([draw // 6, draw % 6], dim=1)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            given = weights if listed else weights.reshape(5, 6)
            results.append(with_gradients(F_itm.maxsim_scores, queries, contexts, given, **options))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_opcheck() -> None:
    queries, contexts = random_fragments([3, 0, 2], 5), random_fragments([4, 1], 5, seed=1)
    tensors = (queries.values, queries.offsets, contexts.values, contexts.offsets)
    for pairs, shape in ((None, (3, 2)), (torch.tensor([[0, 1]]), (1,))):
        options = (pairs, "sum", "both", "float64")
        torch.library.opcheck(torch.ops.itm_fast.maxsim_scores.default, (*tensors, *options))
        gradient = torch.ones(shape, dtype=torch.float64)
        backward = torch.ops.itm_fast.maxsim_scores_backward.default
        torch.library.opcheck(backward, (gradient, *tensors, *options, 3, 4, True, True))


def test_native_operators_run() -> None:
    queries, contexts = random_fragments([3], 5), random_fragments([4], 5, seed=1)
    with native_calls() as calls:
        with_gradients(F_itm.maxsim_scores, queries, contexts, torch.ones(1, 1))
    assert [name for name, _ in calls] == ["maxsim_scores", "maxsim_scores_backward"]


def test_errors() -> None:
    queries, contexts = random_fragments([3, 2], 5), random_fragments([4], 5, seed=1)
    for name in ("similarity", "reduction", "direction"):
        with pytest.raises(ValueError, match=f"{name}: expected one of .*, got 'other'"):
            F_itm.maxsim_scores(queries, contexts, **{name: "other"})
    with pytest.raises(ValueError, match="pairs: expected query sets from 0 to 1, got 2 in pair 1"):
        F_itm.maxsim_scores(queries, contexts, pairs=torch.tensor([[0, 0], [2, 0]]))
    with pytest.raises(ValueError, match="pairs: expected context sets from 0 to 0, got -1 in pair 0"):
        F_itm.maxsim_scores(queries, contexts, pairs=torch.tensor([[0, -1]]))
    with pytest.raises(TypeError, match="pairs: expected a tensor of dtype int64"):
        F_itm.maxsim_scores(queries, contexts, pairs=torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"pairs: expected shape \(2, 2\)"):
        F_itm.maxsim_scores(queries, contexts, pairs=torch.zeros(2, 3, dtype=torch.int64))
    operands = (queries.values, queries.offsets, contexts.values, contexts.offsets)
    with pytest.raises(RuntimeError, match="pairs: expected query sets from 0 to 1, got 9 in pair 0"):
        torch.ops.itm_fast.maxsim_scores(*operands, torch.tensor([[9, 0]]), "sum", "queries", "float64")


def test_pairs_out_of_range_are_clamped_where_they_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks read the pairs, which would synchronize a GPU."""
    queries, contexts = random_fragments([2, 3], 4), random_fragments([3, 1, 2], 4, seed=1)
    right = F_itm.maxsim_scores(queries, contexts, pairs=torch.tensor([[0, 2], [1, 0]]))
    monkeypatch.setattr(maxsim, "_check_pairs", lambda *arguments: None)
    monkeypatch.setattr(maxsim, "use_native", lambda *arguments: False)
    found = F_itm.maxsim_scores(queries, contexts, pairs=torch.tensor([[-1, 9], [5, -7]]))
    torch.testing.assert_close(found, right)
