"""The backward of `cross_attention_scores` if most pairs have a gradient, as with "all" negatives."""

from __future__ import annotations

import pytest
import torch

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from python_tests.helpers.fragments import native_calls, random_fragments
from python_tests.helpers.tolerance import assert_as_accurate, assert_close_to_exact

pytestmark = pytest.mark.native


def gradients(function, queries: Fragments, contexts: Fragments, gradient: torch.Tensor, **options):
    q, c = (side.values.detach().clone().requires_grad_() for side in (queries, contexts))
    scores = function(queries.with_values(q), contexts.with_values(c), **options)
    return torch.autograd.grad(scores, (q, c), gradient.to(scores.dtype))


def recomputed_pairs(queries: Fragments, contexts: Fragments, gradient: torch.Tensor) -> int:
    with native_calls() as calls:
        gradients(F_itm.cross_attention_scores, queries, contexts, gradient)
    return int(dict(calls)["cross_attention_scores_backward"][1][2])


def test_both_ways_give_the_same_gradients_and_count_their_pairs() -> None:
    """The gradient of many pairs in one call equals the sum of the gradients of few pairs per call."""
    queries = random_fragments([9, 17, 0, 3, 24, 300, 1], 37)
    contexts = random_fragments([36, 5, 200, 0, 1, 36], 37, seed=1)
    gradient = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = gradients(F_itm.cross_attention_scores, queries, contexts, gradient)
    assert recomputed_pairs(queries, contexts, gradient) == 6 * 5
    total = [torch.zeros_like(part) for part in whole]
    for row in range(7):
        one = torch.zeros_like(gradient)
        one[row] = gradient[row]
        assert recomputed_pairs(queries, contexts, one) == (0 if row == 2 else 5)
        for sum_, part in zip(total, gradients(F_itm.cross_attention_scores, queries, contexts, one), strict=True):
            sum_ += part
    for actual, expected in zip(whole, total, strict=True):
        assert torch.allclose(actual, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("normalization", "aggregation"),
    [("clipped_l2norm", "logsumexp"), ("softmax", "mean"), ("l1norm", "max"), ("no_norm", "mean")],
)
def test_many_groups_against_the_reference(normalization: str, aggregation: str) -> None:
    """The scores exceed the workspace, so the gradients of the queries are summed over groups of contexts."""
    queries, contexts = random_fragments([40] * 60, 5), random_fragments([45] * 50, 5, seed=1)
    gradient = torch.randn(60, 50, generator=torch.Generator().manual_seed(2))
    gradient[:, ::7] = 0
    options = {"normalization": normalization, "aggregation": aggregation, "temperature": 4.0}
    actual = gradients(F_itm.cross_attention_scores, queries, contexts, gradient, **options)
    exact = gradients(reference.cross_attention_scores_packed, queries, contexts, gradient, **options)
    for a, e in zip(actual, exact, strict=True):
        assert float((a - e).abs().max()) < 1e-10 * max(1.0, float(e.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n_queries", "n_contexts", "dim"), [(60, 50, 4), (20, 9, 77)])
def test_as_accurate_as_plain_pytorch(dtype: torch.dtype, n_queries: int, n_contexts: int, dim: int) -> None:
    """This also holds if the gradients of the queries are summed over groups of contexts and rounded once."""
    queries = random_fragments([40] * n_queries, dim, dtype)
    contexts = random_fragments([45] * n_contexts, dim, dtype, seed=1)
    gradient = torch.randn(n_queries, n_contexts, generator=torch.Generator().manual_seed(2))
    actual = gradients(F_itm.cross_attention_scores, queries, contexts, gradient)
    wide = (side.to(torch.float64) for side in (queries, contexts))
    exact = gradients(reference.cross_attention_scores_packed, *wide, gradient)

    def plain(move=lambda values: values):
        sides = (side.with_values(move(side.values)) for side in (queries, contexts))
        return gradients(reference.cross_attention_scores_packed, *sides, gradient)

    if dtype == torch.float32:
        assert_as_accurate(actual, [plain], exact, names=("queries", "contexts"))
        return
    for a, p, e in zip(actual, plain(), exact, strict=True):
        # Rounding the result loses up to half of the last digit.
        assert_close_to_exact(a, p, e, factor=1.0, floor=torch.finfo(dtype).eps / 2 * float(e.abs().max()))


def test_offsets_that_do_not_begin_at_zero_read_nothing_uninitialised() -> None:
    values = random_fragments([300], 16, torch.float32).values
    queries = Fragments(values, torch.tensor([5, 300]), check=False)
    contexts = random_fragments([36] * 8, 16, torch.float32, seed=1)
    expected = gradients(
        F_itm.cross_attention_scores, Fragments(values, torch.tensor([0, 300])), contexts, torch.ones(1, 8)
    )
    actual = gradients(F_itm.cross_attention_scores, queries, contexts, torch.ones(1, 8))
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_pairs_without_a_gradient_stay_out_whatever_they_hold() -> None:
    queries, contexts = random_fragments([5, 4, 6, 2, 3, 4], 12), random_fragments([7, 3, 5, 2, 4, 6], 12, seed=1)
    gradient = torch.ones(6, 6, dtype=torch.float64)
    gradient[1] = gradient[:, 2] = 0
    clean = gradients(F_itm.cross_attention_scores, queries, contexts, gradient)
    assert recomputed_pairs(queries, contexts, gradient) == 36
    queries.values[6], contexts.values[12] = torch.nan, torch.inf
    assert recomputed_pairs(queries, contexts, gradient) == 25
    spoilt = gradients(F_itm.cross_attention_scores, queries, contexts, gradient)
    for actual, expected in zip(spoilt, clean, strict=True):
        assert torch.allclose(actual, expected, atol=1e-14)
    assert bool((spoilt[0][5:9] == 0).all())
    assert bool((spoilt[1][10:15] == 0).all())


def test_threads_and_frozen_sides_change_nothing() -> None:
    queries = random_fragments([13, 9, 24, 8] * 20, 70, torch.float32)
    contexts = random_fragments([36] * 30, 70, torch.float32, seed=1)
    gradient = torch.randn(80, 30, generator=torch.Generator().manual_seed(2))
    both = gradients(F_itm.cross_attention_scores, queries, contexts, gradient)
    threads = torch.get_num_threads()
    try:
        for count in (2, 5):
            torch.set_num_threads(count)
            again = gradients(F_itm.cross_attention_scores, queries, contexts, gradient)
            assert all(torch.equal(a, b) for a, b in zip(both, again, strict=True))
    finally:
        torch.set_num_threads(threads)
    q = queries.values.clone().requires_grad_()
    only = torch.autograd.grad(F_itm.cross_attention_scores(queries.with_values(q), contexts), q, gradient)[0]
    assert torch.equal(only, both[0])
    c = contexts.values.clone().requires_grad_()
    only = torch.autograd.grad(F_itm.cross_attention_scores(queries, contexts.with_values(c)), c, gradient)[0]
    assert torch.equal(only, both[1])
