"""`cross_attention_scores(focal="hard")`: selected contexts, NaN and infinities, and use of the native operator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import itm_fast.functional as F_itm
from itm_fast import Fragments, models, reference
from itm_fast.ops.cross_attention import AGGREGATIONS, NORMALIZATIONS
from python_tests.helpers.fragments import native_calls, random_fragments, tied_fragments
from python_tests.helpers.tolerance import Form, assert_as_accurate, max_error
from python_tests.operators.test_cross_attention import IMPLEMENTATIONS, RESULTS, with_gradients
from python_tests.shim.backward_checks import clear_of_thresholds

pytestmark = pytest.mark.native

CHAN = {"normalization": "no_norm", "temperature": 1.0, "focal": "hard"}


def fragments(lengths: list[int], dtype: torch.dtype = torch.float64, seed: int = 0) -> Fragments:
    return random_fragments(lengths, 24, dtype, seed=seed)


def refused(*_: object, **__: object) -> None:
    raise AssertionError("the packed form ran")


@pytest.mark.parametrize("aggregation", ["logsumexp", "mean"])
def test_chan_is_computed_by_the_native_operator(monkeypatch: pytest.MonkeyPatch, aggregation: str) -> None:
    """The profiler sees only the native operator, and the numbers match float64.

    For B = 12, the backward takes at most 3 B pairs.
    """
    model = models.create("chan", vocab_size=5, feature_dim=8, embed_dim=24, word_dim=6, aggregation=aggregation)
    words = fragments([1 + number % 7 for number in range(12)], torch.float32)
    regions = fragments([9] * 12, torch.float32, seed=1)
    leaves = [side.values.requires_grad_() for side in (words, regions)]
    monkeypatch.setattr(reference, "cross_attention_scores_packed", refused)
    with profile(activities=[ProfilerActivity.CPU]) as seen, native_calls() as calls:
        scores = model.score(regions.with_values(leaves[1]), words.with_values(leaves[0]))
        F_itm.triplet_loss(scores, mining="hardest").backward()
    names = {event.key for event in seen.key_averages()}
    assert {"itm_fast::cross_attention_scores", "itm_fast::cross_attention_scores_backward"} <= names
    assert not names & {"aten::bmm", "aten::argmax"}
    found = dict(calls)
    assert found["cross_attention_scores"][0][7] == "hard"
    assert 12 <= int(found["cross_attention_scores_backward"][1][2]) <= 36

    wide = [side.values.detach().double().requires_grad_() for side in (words, regions)]
    sides = [list(values.split(side.lengths.tolist())) for values, side in zip(wide, (words, regions), strict=True)]
    rows = []
    for image in sides[1]:
        best = [torch.nn.functional.cosine_similarity(w[:, None], image[None], dim=2).amax(1) for w in sides[0]]
        rows.append(torch.stack([(10 * b).logsumexp(0) / 10 if aggregation == "logsumexp" else b.mean() for b in best]))
    exact = torch.stack(rows)
    reference.triplet_loss(exact, mining="hardest").backward()
    assert max_error(scores, exact) < 1e-6
    for leaf, right in zip(leaves, wide, strict=True):
        assert max_error(leaf.grad, right.grad) < 1e-5


@pytest.mark.parametrize("share", [1.0, 0.1])
@pytest.mark.parametrize(
    ("implementation", "dtype", "allowed"),
    [
        ("packed", torch.float64, 1e-13),
        ("native", torch.float64, 1e-13),
        ("native", torch.float32, 1e-5),
        ("native", torch.bfloat16, 2e-2),
    ],
)
def test_the_first_of_equal_contexts_takes_score_and_gradient(
    implementation: str, dtype: torch.dtype, allowed: float, share: float
) -> None:
    """The tied contexts differ, so that a wrong selection changes the result.

    Checked for few pairs with a gradient and for all pairs.
    """
    queries, contexts = tied_fragments([17, 1, 0, 40], 6, seed=1), tied_fragments([36, 5, 0, 1, 40], 6, seed=2)
    products = queries.values @ contexts[0].T
    assert int((products == products.amax(1, keepdim=True)).sum()) > 2 * len(products)
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(4, 5, generator=generator) * (torch.rand(4, 5, generator=generator) <= share)
    weights[3, 0] = 1.0
    for normalization in ("no_norm", "clipped"):
        options = {**CHAN, "normalization": normalization, "negative_slope": 0.5, "temperature": 2.0}
        exact = with_gradients(reference.cross_attention_scores, queries, contexts, weights, **options)
        given_sides = [side.to(dtype) for side in (queries, contexts)]
        found = with_gradients(IMPLEMENTATIONS[implementation], *given_sides, weights, **options)
        for actual, right, name in zip(found, exact, RESULTS, strict=True):
            assert max_error(actual, right) < allowed * max(1.0, float(right.abs().max())), name


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["word", "region"])
def test_what_is_no_number_stays_where_plain_pytorch_has_it(place: str, value: float, aggregation: str) -> None:
    """No gradient flows through the selection: a NaN product does not reach the gradients of other words."""
    words, regions = fragments([4, 2, 3]), fragments([5, 20, 2], seed=1)
    (words if place == "word" else regions).values[5, 3] = value
    for normalization, share in (("no_norm", 1.0), ("l2norm", 1.0), ("clipped", 0.2)):
        options = {**CHAN, "normalization": normalization, "aggregation": aggregation}
        weights = torch.ones(3, 3, dtype=torch.float64)
        if share < 1:
            weights[[0, 0, 2, 2], [0, 2, 0, 2]] = 0.0
        exact = with_gradients(reference.cross_attention_scores, words, regions, weights, **options)
        found = with_gradients(F_itm.cross_attention_scores, words, regions, weights, **options)
        for actual, right, name in zip(found, exact, RESULTS, strict=True):
            assert bool(right.isnan().any()), name
            torch.testing.assert_close(actual, right, rtol=0, atol=1e-12, equal_nan=True, msg=f"{options}: {name}")


@settings(max_examples=25)
@given(st.data())
def test_native_is_as_accurate_as_plain_pytorch(data: st.DataObject) -> None:
    """float32 on ragged sets against float64, without pairs in which rounding decides the selected context."""
    queries, contexts = (
        random_fragments(
            data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=5)),
            data.draw(st.shared(st.sampled_from([5, 16, 33, 130]), key="dim")),
            torch.float32,
            seed=seed,
        )
        for seed in (5, 6)
    )
    options = {
        "focal": "hard",
        "normalization": data.draw(st.sampled_from(NORMALIZATIONS)),
        "aggregation": data.draw(st.sampled_from(AGGREGATIONS)),
        "temperature": data.draw(st.sampled_from([1.0, 9.0, -2.0])),
    }
    clear = clear_of_thresholds(queries, contexts, **options)
    weights = clear * torch.randn(len(queries), len(contexts), generator=torch.Generator().manual_seed(7))

    def computed(function, *sides: Fragments) -> list[torch.Tensor]:
        scores, *gradients = with_gradients(function, *sides, weights.to(sides[0].dtype), **options)
        return [scores * clear, *gradients]

    def form(function) -> Form:
        return lambda moved: computed(function, *(s.with_values(moved(s.values)) for s in (queries, contexts)))

    exact = computed(reference.cross_attention_scores, *(s.to(torch.float64) for s in (queries, contexts)))
    forms = [form(reference.cross_attention_scores), form(reference.cross_attention_scores_packed)]
    assert_as_accurate(computed(F_itm.cross_attention_scores, queries, contexts), forms, exact, names=RESULTS)
