"""`triplet_loss`: values and gradients of the reference and the native kernels against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import itm_fast.functional as F_itm
from itm_fast import reference
from itm_fast.losses import TripletLoss
from python_tests.helpers.tolerance import assert_close_to_exact
from python_tests.helpers.triplet_cases import (
    IMPLEMENTATIONS,
    MINING,
    assert_equals_loops,
    both_implementations,
    random_scores,
    with_gradients,
)
from python_tests.helpers.triplets import loop_losses
from python_tests.operators.score_strategies import SPECIAL, VALUES

# More than one block of rows, and one row more or less than full vectors.
SIZES = (1, 2, 3, 17, 64, 65, 130)


@both_implementations
@pytest.mark.parametrize("directions", ["both", "rows", "columns"])
@pytest.mark.parametrize("mining", MINING)
def test_every_mining_equals_the_loops(implementation: str, mining: str, directions: str) -> None:
    for size in SIZES:
        scores = random_scores(size, seed=size)
        for positives in (None, random_scores(size, seed=size + 1) > 0.2):
            changed = {"margin": 0.0, "epsilon": 0.3, "selective_divisor": "negatives", "halve": True}
            for changes in ({}, changed) if size <= 65 else ({},):
                options = {"mining": mining, "directions": directions, "positives": positives, **changes}
                assert_equals_loops(IMPLEMENTATIONS[implementation], scores, **options)


@both_implementations
@pytest.mark.parametrize("mining", MINING)
@pytest.mark.parametrize("shape", [(3, 5000), (70, 4), (1, 1), (2, 0)])
def test_separate_positive_scores(implementation: str, mining: str, shape: tuple[int, int]) -> None:
    """With separate positives, score matrices may have any shape; wide ones span several tiles of the kernels."""
    scores = random_scores(*shape)
    for directions, anchors in (("rows", shape[0]), ("columns", shape[1])):
        own = random_scores(1, anchors, seed=1)[0]
        for epsilon in (0.0, 0.2):
            options = {"mining": mining, "directions": directions, "positive_scores": own, "epsilon": epsilon}
            assert_equals_loops(IMPLEMENTATIONS[implementation], scores, **options)


@pytest.mark.native
@pytest.mark.parametrize("mining", MINING)
def test_wide_square_matrices_go_through_several_tiles(mining: str) -> None:
    scores = random_scores(1100, dtype=torch.float32)
    positives = random_scores(1100, seed=1) > 1.0
    exact = reference.triplet_loss(scores.double(), mining=mining, positives=positives, reduction="none")
    plain = reference.triplet_loss(scores, mining=mining, positives=positives, reduction="none")
    actual = F_itm.triplet_loss(scores, mining=mining, positives=positives, reduction="none")
    assert_close_to_exact(actual, plain, exact, name=mining)


@both_implementations
@pytest.mark.parametrize("mining", MINING)
def test_taking_the_positives_out_of_the_matrix_changes_nothing(implementation: str, mining: str) -> None:
    function = IMPLEMENTATIONS[implementation]
    scores = random_scores(9)
    others = scores[~torch.eye(9, dtype=torch.bool)].reshape(9, 8)
    for divisor in ("batch", "negatives"):
        options = {"mining": mining, "epsilon": 0.2, "selective_divisor": divisor, "directions": "rows"}
        square = function(scores, **options)
        separate = function(others, positive_scores=scores.diagonal(), **options)
        assert separate.item() == pytest.approx(square.item(), abs=1e-12)


@both_implementations
def test_reductions_and_halving(implementation: str) -> None:
    function = IMPLEMENTATIONS[implementation]
    scores = random_scores(5)
    each = function(scores, reduction="none")
    assert each.shape == (2, 5)
    rows, columns = (function(scores, directions=name, reduction="none") for name in ("rows", "columns"))
    assert torch.equal(each, torch.stack([rows, columns]))
    assert function(scores).item() == pytest.approx(each.sum().item(), abs=1e-12)
    assert function(scores, reduction="mean").item() == pytest.approx(each.sum().item() / 5, abs=1e-12)
    assert function(scores, halve=True).item() == pytest.approx(each.sum().item() / 2, abs=1e-12)
    assert torch.allclose(function(scores, halve=True, reduction="none"), each / 2)
    for reduction, scale in (("sum", 1.0), ("mean", 0.2)):
        leaf = scores.clone().requires_grad_()
        function(leaf, reduction=reduction, halve=True).backward()
        assert torch.allclose(leaf.grad, 0.5 * scale * loop_losses(scores)[1])


@both_implementations
@pytest.mark.parametrize("mining", MINING)
def test_without_a_negative_the_loss_and_the_gradient_are_zero(implementation: str, mining: str) -> None:
    function = IMPLEMENTATIONS[implementation]
    for scores, positives in (
        (random_scores(1), None),
        (random_scores(6), torch.ones(6, 6, dtype=torch.bool)),
        (torch.full((1, 1), -math.inf, dtype=torch.float64), None),
        (random_scores(0), None),
    ):
        losses, gradient = with_gradients(function, scores, mining=mining, positives=positives)
        assert torch.equal(losses, torch.zeros(2, len(scores), dtype=torch.float64))
        assert torch.equal(gradient, torch.zeros_like(scores))
        assert function(scores, mining=mining, positives=positives, reduction="mean").item() == 0.0


@both_implementations
def test_of_equal_negatives_the_lowest_index_is_taken(implementation: str) -> None:
    scores = torch.full((5, 5), 0.5, dtype=torch.float64)
    _, gradient = with_gradients(IMPLEMENTATIONS[implementation], scores)
    expected = torch.diag(torch.full((5,), -2.0, dtype=torch.float64))
    expected[0, 1:] += 1  # anchors: columns 1 to 4; negative: row 0
    expected[1:, 0] += 1  # anchors: rows 1 to 4; negative: column 0
    expected[0, 1] += 1
    expected[1, 0] += 1
    assert torch.equal(gradient, expected)


@both_implementations
def test_the_hinge_has_no_derivative_at_zero(implementation: str) -> None:
    scores = torch.tensor([[0.5, 0.25], [0.25, 0.5]], dtype=torch.float64)
    for mining in MINING:
        losses, gradient = with_gradients(IMPLEMENTATIONS[implementation], scores, margin=0.25, mining=mining)
        assert not bool(losses.any())
        assert not bool(gradient.any())


@both_implementations
@pytest.mark.parametrize("mining", MINING)
def test_a_nan_reaches_the_loss_of_its_anchors_and_of_no_others(implementation: str, mining: str) -> None:
    function = IMPLEMENTATIONS[implementation]
    for row, column in ((2, 5), (4, 4), (0, 69), (66, 1)):
        scores = random_scores(70)
        scores[row, column] = math.nan
        losses = function(scores, mining=mining, reduction="none")
        expected = torch.zeros(2, 70, dtype=torch.bool)
        expected[0, row] = expected[1, column] = True
        assert torch.equal(losses.isnan(), expected)
        assert math.isnan(function(scores, mining=mining).item())
        masked = torch.zeros(70, 70, dtype=torch.bool)
        masked[row, column] = row != column
        if row != column:
            assert not math.isnan(function(scores, mining=mining, positives=masked).item())
    # A NaN positive makes the loss NaN even without negatives.
    assert math.isnan(function(torch.tensor([[math.nan]]), mining=mining).item())


@pytest.mark.native
@settings(max_examples=300)
@given(st.data())
def test_ties_masks_and_special_values(data: st.DataObject) -> None:
    """On small matrices of few values, native, reference and loops agree on all results except NaN."""
    n = data.draw(st.integers(1, 6))
    directions = data.draw(st.sampled_from(["both", "rows", "columns"]))
    separate = directions != "both" and data.draw(st.booleans())
    m = data.draw(st.integers(0, 6)) if separate else n
    element = data.draw(st.sampled_from([VALUES, VALUES | SPECIAL]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    scores = torch.tensor(data.draw(st.lists(element, min_size=n * m, max_size=n * m)), dtype=dtype).reshape(n, m)
    options: dict[str, Any] = {
        "directions": directions,
        "mining": data.draw(st.sampled_from(MINING)),
        "margin": data.draw(st.sampled_from([-0.25, 0.0, 0.25, 0.5])),
        "epsilon": data.draw(st.sampled_from([0.0, 0.25, 0.5])),
        "selective_divisor": data.draw(st.sampled_from(["batch", "negatives"])),
        "halve": data.draw(st.booleans()),
    }
    if data.draw(st.booleans()):
        mask = data.draw(st.lists(st.booleans(), min_size=n * m, max_size=n * m))
        options["positives"] = torch.tensor(mask, dtype=torch.bool).reshape(n, m)
    if separate:
        anchors = n if directions == "rows" else m
        own = data.draw(st.lists(element, min_size=anchors, max_size=anchors))
        options["positive_scores"] = torch.tensor(own, dtype=dtype)
    exact, gradient, own_gradient = loop_losses(scores, **options)
    for name, function in IMPLEMENTATIONS.items():
        losses, *gradients = with_gradients(function, scores, **options)
        torch.testing.assert_close(losses.double().reshape(exact.shape), exact, equal_nan=True, rtol=1e-6, atol=1e-6)
        # The gradients of a non-finite loss are not defined, but the kernel must not write outside the matrix.
        if bool(exact.isfinite().all()):
            torch.testing.assert_close(gradients[0].double(), gradient, rtol=1e-6, atol=1e-6, msg=name)
            if separate:
                torch.testing.assert_close(gradients[1].double(), own_gradient, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("mining", MINING)
def test_the_module_computes_the_function(mining: str) -> None:
    options = {"mining": mining, "epsilon": 0.3, "selective_divisor": "negatives", "halve": True, "reduction": "mean"}
    scores, mask = random_scores(8), random_scores(8, seed=1) > 0.3
    module = TripletLoss(0.3, **options)
    expected = F_itm.triplet_loss(scores, margin=0.3, positives=mask, **options)
    assert torch.equal(module(scores, positives=mask), expected)
    own = scores.diagonal()
    one_sided = TripletLoss(directions="columns", mining=mining)
    expected = F_itm.triplet_loss(scores, directions="columns", mining=mining, positive_scores=own)
    assert torch.equal(one_sided(scores, positive_scores=own), expected)
    assert (
        repr(TripletLoss())
        == "TripletLoss(margin=0.2, mining='hardest', halve=False, directions='both', reduction='sum')"
    )
    with pytest.raises(ValueError, match="mining: expected one of"):
        TripletLoss(mining="hard")
