"""`triplet_loss` and `hardest_negatives`: values and gradients of the reference and the native kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.fragments import native_calls
from helpers.tolerance import assert_close_to_exact
from helpers.triplets import loop_hardest, loop_losses
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import reference
from itm_fast.losses import TripletLoss

MINING = ("all", "hardest", "selective", "semi_hard", "contrastive")
IMPLEMENTATIONS = {"native": F_itm.triplet_loss, "reference": reference.triplet_loss}
# More than one block of rows, and one row more or less than a whole number of vectors.
SIZES = (1, 2, 3, 17, 64, 65, 130)

both_implementations = pytest.mark.parametrize(
    "implementation", [pytest.param("native", marks=pytest.mark.native), "reference"]
)


def random_scores(n: int, m: int | None = None, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.3 * torch.randn(n, n if m is None else m, generator=generator, dtype=torch.float64)).to(dtype)


def with_gradients(function: Any, scores: Tensor, weights: Tensor | None = None, **options: Any) -> list[Tensor]:
    """The losses of the anchors, and the gradients of the scores and of `positive_scores` where given."""
    inputs = [scores.clone().requires_grad_()]
    if options.get("positive_scores") is not None:
        inputs.append(options["positive_scores"].clone().requires_grad_())
        options = {**options, "positive_scores": inputs[1]}
    losses = function(inputs[0], reduction="none", **options)
    incoming = torch.ones_like(losses) if weights is None else weights.to(losses.dtype).reshape(losses.shape)
    return [losses.detach(), *torch.autograd.grad(losses, inputs, incoming)]


def assert_equals_loops(function: Any, scores: Tensor, tolerance: float = 1e-12, **options: Any) -> None:
    n_directions = 2 if options.get("directions", "both") == "both" else 1
    anchors = scores.shape[1 if options.get("directions") == "columns" else 0]
    weights = torch.linspace(0.5, 1.5, n_directions * anchors, dtype=torch.float64).reshape(n_directions, anchors)
    losses, *gradients = with_gradients(function, scores, weights, **options)
    exact, gradient, own_gradient = loop_losses(scores, weights=weights, **options)
    torch.testing.assert_close(losses.double().reshape(exact.shape), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradients[0].double(), gradient, rtol=tolerance, atol=tolerance)
    # Exactly zero where nothing belongs: what stands before the loss recomputes only what is not.
    assert not bool(gradients[0][gradient == 0].any())
    if options.get("positive_scores") is not None:
        torch.testing.assert_close(gradients[1].double(), own_gradient, rtol=tolerance, atol=tolerance)


# Values and gradients


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
    """Scores of any shape hold negatives only; wide ones take the kernels through several tiles."""
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
    expected[0, 1:] += 1  # of columns 1 to 4, row 0
    expected[1:, 0] += 1  # of rows 1 to 4, column 0
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
    # A positive that is NaN stays visible even where there is nothing to compare it with.
    assert math.isnan(function(torch.tensor([[math.nan]]), mining=mining).item())


values = st.sampled_from([-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0])
special = st.sampled_from([math.nan, math.inf, -math.inf])


@pytest.mark.native
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_ties_masks_and_special_values(data: st.DataObject) -> None:
    """Small matrices of few values: native, reference and loops agree on everything that is not NaN."""
    n = data.draw(st.integers(1, 6))
    directions = data.draw(st.sampled_from(["both", "rows", "columns"]))
    separate = directions != "both" and data.draw(st.booleans())
    m = data.draw(st.integers(0, 6)) if separate else n
    element = data.draw(st.sampled_from([values, values | special]))
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
        # What a loss that is not finite sends back means nothing, but it must stay in the matrix.
        if bool(exact.isfinite().all()):
            torch.testing.assert_close(gradients[0].double(), gradient, rtol=1e-6, atol=1e-6, msg=name)
            if separate:
                torch.testing.assert_close(gradients[1].double(), own_gradient, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.native
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.sampled_from(MINING), st.integers(0, 2**31), st.booleans())
def test_float32_is_as_accurate_as_plain_pytorch(size: int, mining: str, seed: int, with_mask: bool) -> None:
    scores = random_scores(size, dtype=torch.float32, seed=seed)
    options = {"mining": mining, "positives": random_scores(size, seed=seed + 1) > 0.5 if with_mask else None}
    actual = with_gradients(F_itm.triplet_loss, scores, **options)
    plain = with_gradients(reference.triplet_loss, scores, **options)
    exact = with_gradients(reference.triplet_loss, scores.double(), **options)
    # The gradient of a sum counts hinges; one at the rounding of zero may be counted differently.
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


# What the gradient touches


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


# Layouts, threads, native path


@pytest.mark.native
def test_any_strides_are_taken() -> None:
    dense = random_scores(12)
    expected = with_gradients(F_itm.triplet_loss, dense, positives=dense > 0.3)
    wide = torch.zeros(24, 30, dtype=torch.float64)
    wide[::2, 3:15] = dense
    for scores in (dense.t().contiguous().t(), wide[::2, 3:15]):
        leaf = scores.detach().requires_grad_()
        losses = F_itm.triplet_loss(leaf, positives=(scores > 0.3).t().contiguous().t(), reduction="none")
        gradient = torch.autograd.grad(losses.sum(), leaf)[0]  # an expanded gradient comes in
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
    names = ["triplet_loss", "triplet_loss_backward", "hardest_negatives", "hardest_negatives_backward"]
    assert [name for name, _ in calls] == names
    with native_calls() as calls:
        reference.triplet_loss(random_scores(4).requires_grad_()).backward()
    assert calls == []


# Hardest negatives

HARDEST = [pytest.param(F_itm.hardest_negatives, marks=pytest.mark.native), reference.hardest_negatives]


@pytest.mark.parametrize("function", HARDEST)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_hardest_negatives_equal_the_loops(function: Any, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 7))
    element = data.draw(st.sampled_from([values, values | special]))
    scores = torch.tensor(data.draw(st.lists(element, min_size=n * n, max_size=n * n))).reshape(n, n)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n * n, max_size=n * n)), dtype=torch.bool)
    positives = mask.reshape(n, n) if data.draw(st.booleans()) else None
    results = function(scores, positives)
    for side, (found, indices) in enumerate(results):
        matrix = scores if side == 0 else scores.t()
        excluded = torch.eye(n, dtype=torch.bool)
        if positives is not None:
            excluded = excluded | (positives if side == 0 else positives.t())
        assert indices.dtype == torch.int64
        for anchor in range(n):
            negatives = {j: matrix[anchor, j].item() for j in range(n) if not excluded[anchor, j]}
            value, index = loop_hardest(negatives)
            assert indices[anchor].item() == index
            assert found[anchor].item() == value or (math.isnan(value) and math.isnan(found[anchor].item()))


@pytest.mark.parametrize("function", HARDEST)
def test_hardest_negatives_send_their_gradient_to_the_chosen_scores(function: Any) -> None:
    scores = random_scores(90).requires_grad_()
    (rows, row_indices), (columns, column_indices) = function(scores)
    weights = torch.linspace(1, 2, 90, dtype=torch.float64)
    (rows @ weights + 3 * columns @ weights).backward()
    expected = torch.zeros(90, 90, dtype=torch.float64)
    for anchor in range(90):
        expected[anchor, row_indices[anchor]] += weights[anchor]
        expected[column_indices[anchor], anchor] += 3 * weights[anchor]
    assert torch.allclose(scores.grad, expected)
    assert torch.equal(rows, scores.detach()[torch.arange(90), row_indices])
    assert not row_indices.requires_grad


# Module


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
