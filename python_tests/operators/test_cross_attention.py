"""`cross_attention_scores`: values and gradients of the reference, the packed form and the native kernels."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.ops.cross_attention import AGGREGATIONS, FOCAL_MODES, NORMALIZATIONS
from itm_fast.reference.cross_attention import normalize_over_queries
from python_tests.helpers.fragments import native_calls, random_fragments
from python_tests.helpers.tolerance import Form, assert_as_accurate, assert_close_to_exact

IMPLEMENTATIONS = {
    "reference": reference.cross_attention_scores,
    "packed": lambda *args, **kwargs: reference.cross_attention_scores_packed(*args, block_elements=500, **kwargs),
    "native": F_itm.cross_attention_scores,
}
RESULTS = ("scores", "grad_queries", "grad_contexts")
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def score_by_hand(query: list[list[float]], context: list[list[float]], options: dict) -> float:
    """Compute the score of one pair in plain Python, following the definition step by step."""
    if not query or not context:
        return 0.0
    temperature, slope = options.get("temperature", 9.0), options.get("negative_slope", 0.1)
    mode, focal = options.get("normalization", "clipped_l2norm"), options.get("focal")
    raw = [[sum(a * b for a, b in zip(q, x, strict=True)) for x in context] for q in query]
    if mode.startswith("clipped"):
        raw = [[s if s > 0 else slope * s for s in row] for row in raw]
    columns = list(zip(*raw, strict=True))
    normalized = []
    for column in columns:
        if mode.endswith("l2norm"):
            norm = math.sqrt(sum(s * s for s in column)) + 1e-8
            normalized.append([s / norm for s in column])
        elif mode.endswith("l1norm"):
            norm = sum(abs(s) for s in column) + 1e-8
            normalized.append([s / norm for s in column])
        elif mode == "softmax":
            total = sum(math.exp(s - max(column)) for s in column)
            normalized.append([math.exp(s - max(column)) / total for s in column])
        else:
            normalized.append(list(column))
    cosines = []
    for j, q in enumerate(query):
        logits = [temperature * column[j] for column in normalized]
        weights = [math.exp(t - max(logits)) for t in logits]
        p = [w / sum(weights) for w in weights]
        if focal == "hard":
            p = [float(k == logits.index(max(logits))) for k in range(len(p))]
        elif focal is not None:
            if focal == "equal":
                kept = [value * len(p) > sum(p) for value in p]
            else:
                kept = [sum((value - other) * math.sqrt(other) for other in p) > 0 for value in p]
            if any(kept):
                p = [value * keep for value, keep in zip(p, kept, strict=True)]
                p = [value / sum(p) for value in p]
        attended = [sum(w * x[i] for w, x in zip(p, context, strict=True)) for i in range(len(q))]
        norms = math.sqrt(sum(v * v for v in q)) * math.sqrt(sum(v * v for v in attended))
        cosines.append(sum(a * b for a, b in zip(q, attended, strict=True)) / max(norms, 1e-8))
    aggregation = options.get("aggregation", "mean")
    if aggregation in ("mean", "sum"):
        return sum(cosines) / (len(cosines) if aggregation == "mean" else 1)
    if aggregation == "max":
        return max(cosines)
    t = options.get("logsumexp_temperature", 6.0)
    return math.log(sum(math.exp(t * r) for r in cosines)) / t


def with_gradients(function, queries: Fragments, contexts: Fragments, weights: torch.Tensor, **options):
    """Return the scores and the gradients of `sum(weights * scores)`."""
    q, c = (part.values.detach().clone().requires_grad_() for part in (queries, contexts))
    scores = function(queries.with_values(q), contexts.with_values(c), **options)
    if scores.requires_grad:
        (scores * weights).sum().backward()
    # If no pair has rows on both sides, the scores do not depend on the inputs.
    gradients = [torch.zeros_like(part) if part.grad is None else part.grad for part in (q, c)]
    return scores.detach(), *gradients


def plain_forms(queries: Fragments, contexts: Fragments, weights: torch.Tensor, **options) -> list[Form]:
    """Return `with_gradients` of the published loop and of the packed form, for `assert_as_accurate`."""

    def form(function):
        def at(move):
            q, c = (side.with_values(move(side.values)) for side in (queries, contexts))
            return with_gradients(function, q, c, weights, **options)

        return at

    return [form(reference.cross_attention_scores), form(reference.cross_attention_scores_packed)]


@pytest.mark.native
@every_implementation
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("focal", FOCAL_MODES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_values_by_hand(implementation: str, normalization: str, focal: str | None, aggregation: str) -> None:
    queries, contexts = random_fragments([3, 0, 1, 5], 6, seed=1), random_fragments([2, 4, 0], 6, seed=2)
    options = {
        "normalization": normalization,
        "focal": focal,
        "aggregation": aggregation,
        "temperature": 5.0,
        "negative_slope": 0.25,
        "logsumexp_temperature": 3.0,
    }
    scores = IMPLEMENTATIONS[implementation](queries, contexts, **options)
    assert scores.dtype == torch.float64
    for i in range(4):
        for j in range(3):
            expected = score_by_hand(queries[i].tolist(), contexts[j].tolist(), options)
            assert float(scores[i, j]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.native
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("focal", FOCAL_MODES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients(normalization: str, focal: str | None, aggregation: str) -> None:
    """Native gradients match finite differences; those of the packed form and the reference match the native ones."""
    queries, contexts = random_fragments([2, 0, 1], 3, seed=3), random_fragments([3, 1], 3, seed=4)
    options = {"normalization": normalization, "focal": focal, "aggregation": aggregation, "temperature": 3.0}

    def scores(q: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return F_itm.cross_attention_scores(queries.with_values(q), contexts.with_values(c), **options)

    inputs = (queries.values.clone().requires_grad_(), contexts.values.clone().requires_grad_())
    assert torch.autograd.gradcheck(scores, inputs, eps=1e-6, atol=1e-6)
    weights = torch.tensor([[1.0, -2.0], [3.0, 1.0], [0.5, -1.0]], dtype=torch.float64)
    native = with_gradients(F_itm.cross_attention_scores, queries, contexts, weights, **options)
    for name in ("reference", "packed"):
        other = with_gradients(IMPLEMENTATIONS[name], queries, contexts, weights, **options)
        for a, b in zip(native, other, strict=True):
            assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.native
@settings(max_examples=40)
@given(st.data())
def test_native_is_as_accurate_as_plain_pytorch(data: st.DataObject) -> None:
    """In float32 on ragged sets of any size, the error against float64 is within that of plain PyTorch."""
    query_lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=12), label="query_lengths")
    context_lengths = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=8), label="context_lengths")
    dim = data.draw(st.sampled_from([5, 16, 33, 130, 300]), label="dim")
    options = {
        "normalization": data.draw(st.sampled_from(NORMALIZATIONS)),
        "aggregation": data.draw(st.sampled_from(AGGREGATIONS)),
        "temperature": data.draw(st.sampled_from([0.0, 4.0, 9.0])),
    }
    queries = random_fragments(query_lengths, dim, seed=5)
    contexts = random_fragments(context_lengths, dim, seed=6)
    weights = torch.randn(len(queries), len(contexts), generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    single = (queries.to(torch.float32), contexts.to(torch.float32), weights.float())
    exact = with_gradients(reference.cross_attention_scores, *(part.to(torch.float64) for part in single), **options)
    native = with_gradients(F_itm.cross_attention_scores, *single, **options)
    assert_as_accurate(native, plain_forms(*single, **options), exact, names=RESULTS)


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs(dtype: torch.dtype) -> None:
    """Scores are float32 and as accurate as for widened inputs; gradients of few pairs equal theirs, rounded once."""
    queries, contexts = random_fragments([7, 3], 64, dtype), random_fragments([5, 9, 2], 64, dtype, seed=1)
    weights = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 0.0]])
    scores, *gradients = with_gradients(F_itm.cross_attention_scores, queries, contexts, weights)
    single = (queries.to(torch.float32), contexts.to(torch.float32), weights)
    wide = with_gradients(F_itm.cross_attention_scores, *single)[1:]
    exact = with_gradients(reference.cross_attention_scores, *(part.to(torch.float64) for part in single))
    assert_as_accurate([scores, *wide], plain_forms(*single), exact, names=RESULTS)
    for gradient, expected in zip(gradients, wide, strict=True):
        assert gradient.dtype == dtype
        assert torch.equal(gradient, expected.to(dtype))


@pytest.mark.native
def test_backward_recomputes_only_what_the_gradient_needs() -> None:
    queries, contexts = random_fragments([4, 2, 5, 0], 8), random_fragments([3, 6, 0], 8, seed=1)
    q, c = queries.values.requires_grad_(), contexts.values.requires_grad_()
    scores = F_itm.cross_attention_scores(queries.with_values(q), contexts.with_values(c))
    gradient = torch.zeros_like(scores)
    gradient[2, 0], gradient[0, 1] = 1.5, float("nan")
    gradient[3, 0], gradient[0, 2] = 1.0, 1.0  # pairs with an empty set need no recomputation
    with native_calls() as calls:
        scores.backward(gradient)
    assert [name for name, _ in calls] == ["cross_attention_scores_backward"]
    assert int(calls[0][1][1][2]) == 2
    # The NaN stays in its own pair; unused sets have a gradient of exactly zero.
    assert bool(q.grad[0:4].isnan().all())
    assert bool(c.grad[3:9].isnan().all())
    assert bool((q.grad[4:6] == 0).all())
    clean = torch.zeros_like(scores)
    clean[2, 0] = 1.5
    _, expected_q, expected_c = with_gradients(reference.cross_attention_scores, queries, contexts, clean)
    assert torch.allclose(q.grad[6:], expected_q[6:], atol=1e-14)
    assert torch.allclose(c.grad[:3], expected_c[:3], atol=1e-14)


@pytest.mark.native
def test_hardest_negative_step_touches_at_most_three_pairs_an_anchor() -> None:
    batch = 24
    generator = torch.Generator().manual_seed(0)
    words = random_fragments(torch.randint(8, 20, (batch,), generator=generator).tolist(), 32, torch.float32)
    regions = random_fragments([36] * batch, 32, torch.float32, seed=1)
    w, r = words.values.requires_grad_(), regions.values.requires_grad_()
    with native_calls() as calls:
        scores = F_itm.cross_attention_scores(words.with_values(w), regions.with_values(r)).t()
        F_itm.triplet_loss(scores, margin=0.2).backward()
    names = [name for name, _ in calls]
    assert "cross_attention_scores" in names
    recomputed = int(dict(calls)["cross_attention_scores_backward"][1][2])
    assert batch < recomputed <= 3 * batch
    exact_w, exact_r = (
        words.values.detach().double().requires_grad_(),
        regions.values.detach().double().requires_grad_(),
    )
    exact = reference.cross_attention_scores(words.with_values(exact_w), regions.with_values(exact_r)).t()
    reference.triplet_loss(exact, margin=0.2).backward()
    assert torch.allclose(w.grad.double(), exact_w.grad, atol=1e-5)
    assert torch.allclose(r.grad.double(), exact_r.grad, atol=1e-5)


@pytest.mark.native
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    queries = random_fragments([13, 9, 24, 8] * 20, 200, torch.float32)
    contexts = random_fragments([36] * 30, 200, torch.float32, seed=1)
    weights = torch.randn(80, 30, generator=torch.Generator().manual_seed(2))
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(with_gradients(F_itm.cross_attention_scores, queries, contexts, weights))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.native
def test_sets_longer_than_a_tile() -> None:
    queries, contexts = random_fragments([300, 2], 10), random_fragments([3, 200], 10, seed=1)
    weights = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.float64)
    native = with_gradients(F_itm.cross_attention_scores, queries, contexts, weights)
    expected = with_gradients(reference.cross_attention_scores, queries, contexts, weights)
    for a, b in zip(native, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.native
@pytest.mark.parametrize("implementation", ["packed", "native"])
@pytest.mark.parametrize("temperature", [0.0, 1e-3, 9.0])
def test_contexts_that_cancel(implementation: str, temperature: float) -> None:
    """The Gram form loses all digits of the squared norm of a short attended vector, so the vector must be formed."""
    generator = torch.Generator().manual_seed(0)
    base = torch.nn.functional.normalize(torch.randn(1, 64, generator=generator, dtype=torch.float64), dim=1)
    small = 1e-4 * torch.randn(8, 64, generator=generator, dtype=torch.float64)
    contexts = Fragments.from_list([torch.cat([base, -base]).repeat(4, 1) + small])
    queries = random_fragments([6], 64, seed=1)
    single = (queries.to(torch.float32), contexts.to(torch.float32), torch.ones(1, 1))
    exact = with_gradients(
        reference.cross_attention_scores, *(part.to(torch.float64) for part in single), temperature=temperature
    )
    result = with_gradients(IMPLEMENTATIONS[implementation], *single, temperature=temperature)
    # The loop's weights of 1/8 at temperature 0 happen to be exact; draws with perturbed inputs show the rounding
    # error.
    loop = plain_forms(*single, temperature=temperature)[:1]
    assert_as_accurate(result, loop, exact, names=RESULTS)


@pytest.mark.native
@every_implementation
def test_rows_without_width(implementation: str) -> None:
    """Rows of width 0 score like zero vectors, whatever uninitialised memory holds."""
    torch.full((4000, 100), float("nan"))
    queries, contexts = (Fragments(torch.zeros(n, 0), torch.tensor([0, 2, n])) for n in (5, 4))
    assert IMPLEMENTATIONS[implementation](queries, contexts).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.native
@every_implementation
def test_negative_logsumexp_temperature(implementation: str) -> None:
    """A negative temperature gives a soft minimum, on captions of different lengths."""
    queries, contexts = random_fragments([1, 4], 6), random_fragments([3, 2], 6, seed=1)
    options = {"aggregation": "logsumexp", "logsumexp_temperature": -5.0}
    scores = IMPLEMENTATIONS[implementation](queries, contexts, **options)
    for i in range(2):
        for j in range(2):
            expected = score_by_hand(queries[i].tolist(), contexts[j].tolist(), options)
            assert float(scores[i, j]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("t", [1e10, -1e10, 1e20, -1e30, 1e30])
def test_extreme_temperatures(t: float, dtype: torch.dtype) -> None:
    """Both temperatures work up to their bound."""
    queries, contexts = random_fragments([3, 4], 6, dtype), random_fragments([3, 2], 6, dtype, seed=1)
    for options in ({"aggregation": "logsumexp", "logsumexp_temperature": t}, {"temperature": t}):
        native = with_gradients(F_itm.cross_attention_scores, queries, contexts, torch.ones(2, 2), **options)
        exact = with_gradients(
            reference.cross_attention_scores,
            queries.to(torch.float64),
            contexts.to(torch.float64),
            torch.ones(2, 2),
            **options,
        )
        assert torch.allclose(native[0].double(), exact[0], atol=1e-6)
        for found, expected in zip(native[1:], exact[1:], strict=True):
            # If the attention is nearly hard, its derivative times the temperature is mostly rounding error.
            if "temperature" not in options:
                assert torch.allclose(found.double(), expected, atol=1e-5)
            assert torch.isfinite(found).all()


@pytest.mark.native
@pytest.mark.parametrize("temperature", [9.0, -9.0, 20.0])
@pytest.mark.parametrize("scale", [1e9, 1e12, 1e15, 1e17])
def test_large_context_rows(scale: float, temperature: float) -> None:
    """The squared norms of the attended rows stay within float32."""
    queries, contexts = (random_fragments([5, 4, 6], 16, torch.float32, seed=seed) for seed in (0, 1))
    contexts = contexts.with_values(contexts.values * scale)
    found = F_itm.cross_attention_scores(queries, contexts, temperature=temperature)
    exact = reference.cross_attention_scores(
        queries.to(torch.float64), contexts.to(torch.float64), temperature=temperature
    )
    torch.testing.assert_close(found, exact.float(), atol=1e-6, rtol=0)


@pytest.mark.native
def test_a_frozen_side_costs_no_gradient() -> None:
    queries, contexts = random_fragments([3, 2], 4), random_fragments([2, 5], 4, seed=1)
    _, both_q, both_c = with_gradients(F_itm.cross_attention_scores, queries, contexts, torch.ones(2, 2))
    q, c = queries.values.clone().requires_grad_(), contexts.values.clone().requires_grad_()
    for leaf, arguments, expected, shapes in (
        (q, (queries.with_values(q), contexts), both_q, [(5, 4), (0, 4)]),
        (c, (queries, contexts.with_values(c)), both_c, [(0, 4), (7, 4)]),
    ):
        scores = F_itm.cross_attention_scores(*arguments)
        with native_calls() as calls:
            scores.sum().backward()
        assert [tuple(part.shape) for part in calls[0][1][1][:2]] == shapes
        assert torch.equal(leaf.grad, expected)


@pytest.mark.native
@every_implementation
def test_zero_vectors_and_uniform_attention_have_finite_gradients(implementation: str) -> None:
    queries = random_fragments([2, 2], 4).with_values(torch.zeros(4, 4, dtype=torch.float64))
    contexts = random_fragments([2, 4], 4, seed=1).with_values(torch.zeros(6, 4, dtype=torch.float64))
    for focal in FOCAL_MODES:
        results = with_gradients(IMPLEMENTATIONS[implementation], queries, contexts, torch.ones(2, 2), focal=focal)
        assert all(bool((part == 0).all()) for part in results)
    # Equal contexts: the attention is uniform, no context is above the others, and all are kept.
    equal = Fragments.from_list([torch.ones(4, 4, dtype=torch.float64)])
    query = random_fragments([1], 4)
    scores = [IMPLEMENTATIONS[implementation](query, equal, focal=focal) for focal in FOCAL_MODES]
    expected = float(query.values.sum() / 2.0 / query.values.norm())
    assert [float(s) for s in scores] == pytest.approx([expected] * len(FOCAL_MODES), abs=1e-12)


@pytest.mark.native
@every_implementation
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_stay_in_their_pairs(implementation: str, bad: float) -> None:
    queries, contexts = random_fragments([3, 2], 4), random_fragments([2, 5, 1], 4, seed=1)
    clean = IMPLEMENTATIONS[implementation](queries, contexts)
    queries.values[4, 1] = bad
    scores = IMPLEMENTATIONS[implementation](queries, contexts)
    assert bool(scores[1].isnan().all())
    assert torch.allclose(scores[0], clean[0], atol=1e-14)


@pytest.mark.native
@every_implementation
def test_nothing_to_score(implementation: str) -> None:
    some, none = random_fragments([3, 2], 4), Fragments(torch.zeros(0, 4, dtype=torch.float64), torch.zeros(1).long())
    empty = Fragments(torch.zeros(0, 4, dtype=torch.float64), torch.zeros(3).long())
    assert IMPLEMENTATIONS[implementation](some, none).shape == (2, 0)
    assert IMPLEMENTATIONS[implementation](none, some).shape == (0, 2)
    assert IMPLEMENTATIONS[implementation](some, empty).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert IMPLEMENTATIONS[implementation](empty, some).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.native
def test_strided_inputs_and_expanded_gradient() -> None:
    wide = torch.randn(12, 20, dtype=torch.float64)
    queries = Fragments(wide[::2, ::2], torch.tensor([0, 2, 6], dtype=torch.int32))
    contexts = random_fragments([3, 4], 10)
    dense = Fragments(queries.values.contiguous(), queries.offsets.long())
    assert torch.equal(F_itm.cross_attention_scores(queries, contexts), F_itm.cross_attention_scores(dense, contexts))
    _, grad, _ = with_gradients(F_itm.cross_attention_scores, queries, contexts, torch.ones(()).expand(2, 2).double())
    _, expected, _ = with_gradients(reference.cross_attention_scores, dense, contexts, torch.ones(2, 2).double())
    assert torch.allclose(grad, expected, atol=1e-14)


@pytest.mark.native
@pytest.mark.parametrize("norm", [1.0, 1e4, 1e6])
def test_a_saturated_softmax_over_the_queries_has_a_gradient_that_cancels(norm: float) -> None:
    words = random_fragments([1, 6, 3], 20, torch.float32)
    regions = random_fragments([5, 9], 20, torch.float32, seed=1)
    words, regions = (side.with_values(side.values * norm) for side in (words, regions))
    weights = torch.randn(3, 2, generator=torch.Generator().manual_seed(2))
    options = {"normalization": "softmax"}
    native = with_gradients(F_itm.cross_attention_scores, words, regions, weights, **options)
    plain = with_gradients(reference.cross_attention_scores, words, regions, weights, **options)
    wide = (side.to(torch.float64) for side in (words, regions))
    exact = with_gradients(reference.cross_attention_scores, *wide, weights.double(), **options)
    for name, a, p, e in zip(RESULTS, native, plain, exact, strict=True):
        assert_close_to_exact(a, p, e, name=name)


@pytest.mark.native
def test_offsets_past_the_end_are_clamped() -> None:
    """Unchecked offsets never read outside the values."""
    contexts = random_fragments([2], 4)
    values = torch.randn(3, 4, dtype=torch.float64)
    wrong = Fragments(values, torch.tensor([0, 2, 1, 900]), check=False)
    right = Fragments(values, torch.tensor([0, 2, 2, 3]))
    assert torch.equal(F_itm.cross_attention_scores(wrong, contexts), F_itm.cross_attention_scores(right, contexts))


@pytest.mark.parametrize("normalization", ["l2norm", "l1norm", "softmax"])
def test_a_nan_reaches_all_rows_of_its_query_set(normalization: str) -> None:
    raw = torch.ones(5, 2, 1)
    raw[1] = torch.nan
    found = normalize_over_queries(raw, normalization, torch.tensor([0, 0, 0, 1, 1]), 2)
    assert found.isnan().flatten(1).all(1).tolist() == [True, True, True, False, False]
