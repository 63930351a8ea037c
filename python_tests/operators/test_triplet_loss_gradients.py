"""`triplet_loss`: accuracy and sparsity of its gradient, memory layouts, threads and the native path."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import reference
from python_tests.helpers.fragments import native_calls
from python_tests.helpers.tolerance import assert_close_to_exact
from python_tests.helpers.triplet_cases import (
    MINING,
    random_scores,
    with_gradients,
)
from python_tests.helpers.triplets import loop_losses


@pytest.mark.native
@settings(max_examples=40)
@given(st.integers(1, 300), st.sampled_from(MINING), st.integers(0, 2**31), st.booleans())
def test_float32_is_as_accurate_as_plain_pytorch(size: int, mining: str, seed: int, with_mask: bool) -> None:
    scores = random_scores(size, dtype=torch.float32, seed=seed)
    options = {"mining": mining, "positives": random_scores(size, seed=seed + 1) > 0.5 if with_mask else None}
    actual = with_gradients(F_itm.triplet_loss, scores, **options)
    plain = with_gradients(reference.triplet_loss, scores, **options)
    exact = with_gradients(reference.triplet_loss, scores.double(), **options)
    # The gradient of a sum counts active hinges; a hinge within rounding of zero may count differently.
    own = scores.diagonal()
    hinges = torch.stack([0.2 + scores - own[:, None], 0.2 + scores - own])
    near = mining in ("all", "selective") and bool((hinges.abs() < 1e-6).any())
    for name, a, p, e in zip(("losses", "gradient"), actual, plain, exact, strict=True):
        if name == "losses" or not near:
            assert_close_to_exact(a, p, e, name=f"{mining} {name}")


@pytest.mark.native
@pytest.mark.parametrize("mining", MINING)
def test_gradcheck(mining: str) -> None:
    scores, mask = random_scores(7), random_scores(7, seed=1) > 0.4
    own = random_scores(1, 7, seed=2)[0]
    for options in (
        {"reduction": "none"},
        {"reduction": "mean", "positives": mask, "epsilon": 0.3, "halve": True},
        {"directions": "rows", "positive_scores": own, "selective_divisor": "negatives", "epsilon": 0.3},
        {"directions": "columns", "positive_scores": own, "positives": mask},
    ):
        inputs = [scores.clone().requires_grad_()]
        if "positive_scores" in options:
            inputs.append(own.clone().requires_grad_())

        def loss(s: Tensor, p: Tensor | None = None, options: dict[str, Any] = options) -> Tensor:
            return F_itm.triplet_loss(
                s, mining=mining, **({**options, "positive_scores": p} if p is not None else options)
            )

        assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.native
def test_hardest_mining_sends_gradient_to_at_most_three_pairs_an_anchor() -> None:
    scores = random_scores(200, dtype=torch.float32)
    _, gradient = with_gradients(F_itm.triplet_loss, scores)
    touched = {(i, i) for i in range(200)}
    (_, rows), (_, columns) = F_itm.hardest_negatives(scores)
    touched |= {(i, j) for i, j in enumerate(rows.tolist())} | {(i, j) for j, i in enumerate(columns.tolist())}
    assert {tuple(pair) for pair in gradient.nonzero().tolist()} <= touched
    assert int((gradient != 0).sum()) > 400


@pytest.mark.native
@pytest.mark.parametrize("mining", MINING)
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_an_incoming_gradient_that_is_not_finite_or_zero_stays_with_its_anchor(mining: str, value: float) -> None:
    scores = random_scores(66)
    options = {"mining": mining, "epsilon": 0.2}
    weights = torch.ones(2, 66, dtype=torch.float64)
    weights[0, 65] = value
    _, gradient = with_gradients(F_itm.triplet_loss, scores, weights, **options)
    finite = weights.nan_to_num(posinf=0.0).where(weights == 1, 0.0)
    expected = loop_losses(scores, weights=finite, **options)[1]
    assert torch.allclose(gradient[:65], expected[:65], atol=1e-12)
    only_this = torch.zeros(2, 66, dtype=torch.float64)
    only_this[0, 65] = 1.0
    touched = loop_losses(scores, weights=only_this, **options)[1][65] != 0
    assert torch.allclose(gradient[65, ~touched], expected[65, ~touched], atol=1e-12)
    assert bool(touched.any())
    assert torch.equal(gradient[65, touched].isfinite(), torch.full((int(touched.sum()),), math.isfinite(value)))


@pytest.mark.native
def test_any_strides_are_taken() -> None:
    dense = random_scores(12)
    expected = with_gradients(F_itm.triplet_loss, dense, positives=dense > 0.3)
    wide = torch.zeros(24, 30, dtype=torch.float64)
    wide[::2, 3:15] = dense
    for scores in (dense.t().contiguous().t(), wide[::2, 3:15]):
        leaf = scores.detach().requires_grad_()
        losses = F_itm.triplet_loss(leaf, positives=(scores > 0.3).t().contiguous().t(), reduction="none")
        gradient = torch.autograd.grad(losses.sum(), leaf)[0]  # the incoming gradient is expanded
        assert torch.equal(losses, expected[0])
        assert torch.equal(gradient, expected[1])


@pytest.mark.native
@pytest.mark.parametrize("mining", MINING)
def test_results_do_not_depend_on_the_number_of_threads(mining: str) -> None:
    scores = random_scores(700, dtype=torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            results.append(with_gradients(F_itm.triplet_loss, scores, mining=mining, epsilon=0.1))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.native
def test_the_native_kernels_run() -> None:
    with native_calls() as calls:
        F_itm.triplet_loss(random_scores(4).requires_grad_()).backward()
        (values, _), _ = F_itm.hardest_negatives(random_scores(4).requires_grad_())
        values.sum().backward()
    names = [
        "triplet_loss_with_gradient",
        "scale_gradient",
        "hardest_negatives",
        "hardest_negatives_backward",
    ]
    assert [name for name, _ in calls] == names
    with native_calls() as calls:
        reference.triplet_loss(random_scores(4).requires_grad_()).backward()
    assert calls == []
