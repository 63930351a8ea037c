"""`domain_regularization`: risks, hinges and gradients against loops over the paper's equations."""

from __future__ import annotations

import importlib
import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import itm_fast.functional as F_itm
from itm_fast import reference
from python_tests.helpers.domain import (
    NAMES,
    Batch,
    Loops,
    loop_regularization,
    nearest_edge,
    plain_form,
    random_batch,
    run,
)
from python_tests.helpers.fragments import native_calls
from python_tests.helpers.tolerance import assert_as_accurate

FORMS = {
    "loops": reference.domain_regularization,
    "packed": reference.domain_regularization_packed,
    "native": F_itm.domain_regularization,
}
# Batches with q = r, with missing negatives, with a negative shared by many pairs, with pairs that are mutual
# negatives, with a pair that is its own negative, and with empty sets.
BATCHES = {
    "q is r": random_batch([3, 2, 4], [2, 5, 1], captions=[1, 2, 0], images=[1, 0, 0]),
    "missing": random_batch([3, 2, 4], [2, 5, 1], captions=[-1, 2, -1], images=[-1, -1, 1], seed=3),
    "all of one": random_batch([3, 2, 4, 1], [2, 5, 1, 3], captions=[3, 3, 3, 0], images=[3, 3, 3, 1], seed=6),
    "each other": random_batch([3, 2], [2, 5], captions=[1, 0], images=[1, 0], seed=9),
    "itself": random_batch([3, 2], [2, 5], captions=[0, 0], images=[1, 1], seed=12),
    "empty sets": random_batch([0, 2, 0], [2, 0, 0], captions=[1, 2, 0], images=[2, 0, 1], seed=15),
    "one pair": random_batch([4], [3], captions=[-1], images=[-1], seed=18),
    "no pair": random_batch([], [], captions=[], images=[]),
    "wide": random_batch([3, 7], [9, 2], 150, captions=[1, 0], images=[-1, 0], seed=21),
}
INCOMING = torch.tensor([[0.7, -1.3, 0.4, 1.1], [1.2, 0.5, -0.8, 0.3]], dtype=torch.float64)


def incoming_of(batch: Batch) -> torch.Tensor:
    return INCOMING[:, : len(batch.regions)]


def exact(batch: Batch, **options: Any) -> Loops:
    return loop_regularization(batch, incoming_of(batch), **options)


@pytest.mark.parametrize("form", ["loops", "packed", pytest.param("native", marks=pytest.mark.native)])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("margin", "aggregation"), [(0.05, "sum"), (6.0, "sum"), (0.3, "mean")])
def test_values_and_gradients_of_every_argument(form: str, name: str, margin: float, aggregation: str) -> None:
    batch, options = BATCHES[name], {"margin": margin, "aggregation": aggregation}
    right = exact(batch, **options)
    # Rounding decides no hinge. The hinge of a pair with itself is the margin.
    assert right.doubt > 1e-3
    found = run(FORMS[form], batch, incoming_of(batch), **options)
    for what, actual, truth in zip(NAMES, found, right.results, strict=True):
        assert actual.dtype == torch.float64
        torch.testing.assert_close(actual, truth, rtol=1e-10, atol=1e-12, msg=lambda text, w=what: f"{w}: {text}")


def test_a_batch_worked_by_hand() -> None:
    """With zero weights, every row costs log 2, every hinge is the margin, and slopes are a half."""
    batch = random_batch([2, 1], [1, 3], 3, captions=[1, 0], images=[-1, 0], seed=1)
    batch = attrs.evolve(batch, weights=torch.zeros(2, 3).double(), biases=torch.zeros(2).double())
    incoming = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    adversarial, regularization, *gradients = run(F_itm.domain_regularization, batch, incoming)
    torch.testing.assert_close(adversarial, math.log(2) * torch.tensor([3.0, 4.0]).double())
    torch.testing.assert_close(regularization, torch.tensor([0.1, 0.2]).double())
    v, w = batch.regions[0], batch.words[0]
    torch.testing.assert_close(gradients[2], torch.stack([(w.sum(0) - v.sum(0)) / 2, torch.zeros(3).double()]))
    torch.testing.assert_close(gradients[3], torch.tensor([-0.5, 0.0]).double())
    assert not gradients[0].any()
    # With the regularisation, all terms but one cancel: the own risk of each pair has the slope of its risk with
    # another discriminator.
    own = run(F_itm.domain_regularization, batch, torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    torch.testing.assert_close(own[4][0], (w.sum(0) - v.sum(0) - batch.words[1].sum(0) + batch.regions[1].sum(0)) / 2)


def test_without_negatives_there_is_no_regularization() -> None:
    batch = attrs.evolve(BATCHES["all of one"], negative_captions=None, negative_images=None)
    with native_calls() as calls:
        found = run(F_itm.domain_regularization, batch, incoming_of(batch))
    assert not found[1].any()
    # Only the required risks are computed.
    assert [result[2].shape for name, (_, result) in calls if name == "domain_regularization"] == [(1, 4)]
    for actual, truth in zip(found, exact(batch).results, strict=True):
        torch.testing.assert_close(actual, truth, rtol=1e-10, atol=1e-12)


def test_gradients_are_computed_where_they_are_wanted() -> None:
    batch = BATCHES["all of one"]
    whole = dict(zip(NAMES, run(F_itm.domain_regularization, batch, incoming_of(batch)), strict=True))
    for wanted in (("weights",), ("biases",), ("regions",), ("words",), ("words", "biases")):
        with native_calls() as calls:
            found = run(F_itm.domain_regularization, batch, incoming_of(batch), wanted=wanted)
        for name, gradient in zip(wanted, found[2:], strict=True):
            assert torch.equal(gradient, whole[name])
        forward, backward = (result for _, (_, result) in calls)
        assert len(forward[3]) == (5 if {"weights", "biases"} & {*wanted} else 0)
        rows = [len(part) for part in backward[:2]]
        assert rows == [10 if "regions" in wanted else 0, 11 if "words" in wanted else 0]


@pytest.mark.native
@settings(max_examples=25)
@given(st.data())
def test_random_batches_in_every_dtype(data: st.DataObject) -> None:
    """The error is at most twice that of plain PyTorch in float32, if rounding decides no hinge."""
    pairs = data.draw(st.integers(1, 40))
    lengths = [data.draw(st.lists(st.integers(0, 9), min_size=pairs, max_size=pairs)) for _ in range(2)]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    weights = data.draw(st.sampled_from([torch.float32, dtype]))
    seed = data.draw(st.integers(0, 2**31))
    batch = random_batch(*lengths, data.draw(st.sampled_from([1, 7, 16, 33, 80])), seed=seed).to(dtype, weights)
    options = {"margin": 2.0, "aggregation": data.draw(st.sampled_from(["sum", "mean"]))}
    assume(nearest_edge(batch, **options) > 1e-4)
    incoming = torch.randn(2, pairs, generator=torch.Generator().manual_seed(seed))
    found = run(F_itm.domain_regularization, batch, incoming, **options)
    right = run(reference.domain_regularization_packed, batch.to(torch.float64), incoming, **options)
    assert_as_accurate(found, [plain_form(batch, incoming, found, **options)], right, names=NAMES)


@pytest.mark.native
def test_a_nan_stays_visible_and_where_no_gradient_comes_nothing_is_added() -> None:
    batch = BATCHES["q is r"]
    values = batch.words.values.clone()
    values[0, 0] = math.nan
    batch = attrs.evolve(batch, words=batch.words.with_values(values))
    found = dict(zip(NAMES, run(F_itm.domain_regularization, batch, incoming_of(batch)), strict=True))
    assert found["adversarial"].isnan().tolist() == [True, False, False]
    assert found["regularization"].isnan().all()  # Pair 0 is the negative of all others.
    zero = run(F_itm.domain_regularization, batch, torch.zeros(2, 3))
    assert not any(part.any() for part in zero[2:])


@pytest.mark.native
def test_extreme_logits_overflow_nowhere() -> None:
    for dtype in (torch.float32, torch.float64):
        batch = random_batch([1, 1], [1, 1], 1, captions=[1, 0], images=[1, 0]).to(dtype)
        one = torch.ones(2, 1, dtype=dtype)
        batch = attrs.evolve(
            batch,
            regions=batch.regions.with_values(one),
            words=batch.words.with_values(-one),
            weights=one * torch.tensor([[1e4], [-1e4]], dtype=dtype),
            biases=torch.zeros(2, dtype=dtype),
        )
        found = run(F_itm.domain_regularization, batch, torch.ones(2, 2), margin=1.0)
        # The first discriminator is always right, the second always wrong.
        assert found[0].tolist() == [0.0, 2e4]
        assert found[1].tolist() == [2 * 0.0 + 2 * (1 + 2e4), 2 * (1 + 2e4) + 2 * 0.0]
        assert all(part.isfinite().all() for part in found)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    batch = random_batch([7] * 60, [5] * 60, 40, seed=4).to(torch.float32)
    incoming = torch.randn(2, 60, generator=torch.Generator().manual_seed(0))
    found = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 4):
            torch.set_num_threads(number)
            found.append(run(F_itm.domain_regularization, batch, incoming))
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_the_packed_form_in_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, incoming = BATCHES["all of one"], INCOMING
    whole = run(reference.domain_regularization_packed, batch, incoming)
    module = importlib.import_module("itm_fast.reference.domain_regularization")
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 24)  # Two discriminators at a time.
    for one, other in zip(whole, run(reference.domain_regularization_packed, batch, incoming), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
