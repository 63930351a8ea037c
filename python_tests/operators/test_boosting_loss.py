"""`boosting_loss`: values and gradients of the reference and the native kernels against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import itm_fast.functional as F_itm
from itm_fast import reference
from itm_fast.losses import BoostingLoss
from python_tests.helpers.boosting import MINING, STRATEGIES, loop_boosting, lower, random_pair, upper, with_gradient
from python_tests.helpers.fragments import native_calls
from python_tests.helpers.tolerance import assert_close_to_exact
from python_tests.operators.score_strategies import SPECIAL, VALUES

IMPLEMENTATIONS = {"native": F_itm.boosting_loss, "reference": reference.boosting_loss}
both_implementations = pytest.mark.parametrize(
    "implementation", [pytest.param("native", marks=pytest.mark.native), "reference"]
)
every_form = pytest.mark.parametrize(
    ("strategy", "mining", "soft"),
    [(strategy, mining, soft) for strategy in STRATEGIES for mining in MINING for soft in (False, True)],
)

# d = s - a. Positives: 0.25, -0.25 and 0.
TARGET = torch.tensor([[0.75, 0.25, 0.5], [0.0, 0.25, 0.25], [0.5, 0.0, 0.5]], dtype=torch.float64)
ANCHOR = torch.tensor([[0.5, 0.25, 0.0], [0.25, 0.5, 0.0], [0.5, -0.25, 0.5]], dtype=torch.float64)
# d of the negatives, row by row: 0, 0.5 | -0.25, 0.25 | 0, 0.25. Margin 0.5 and alpha 0.25 give the margins 0.125 and
# 0.375.
BY_HAND: dict[tuple[str, str], list[list[float]]] = {
    # [0.5 + d_neg - d_pos]_+ over the rows (0.25, 0.75 | 0.5, 1 | 0.5, 0.75), then over the columns with the negatives
    # -0.25, 0 | 0, 0.25 | 0.5, 0.25 (0, 0.25 | 0.75, 1 | 1, 0.75).
    ("relative", "all"): [[1.0, 1.5, 1.25], [0.25, 1.75, 1.75]],
    ("relative", "hardest"): [[0.75, 1.0, 0.75], [0.25, 1.0, 1.0]],
    # Positives: [0.125 - d_pos]_+ = 0, 0.375, 0.125, twice for "all". Negatives: [0.375 + d_neg]_+ over the rows
    # (0.375, 0.875 | 0.125, 0.625 | 0.375, 0.625), over the columns (0.125, 0.375 | 0.375, 0.625 | 0.875, 0.625).
    ("absolute", "all"): [[1.25, 1.5, 1.25], [0.5, 1.75, 1.75]],
    ("absolute", "hardest"): [[0.875, 1.0, 0.75], [0.375, 1.0, 1.0]],
}


@both_implementations
@pytest.mark.parametrize(("strategy", "mining"), BY_HAND)
def test_an_example_by_hand(implementation: str, strategy: str, mining: str) -> None:
    function, expected = IMPLEMENTATIONS[implementation], torch.tensor(BY_HAND[strategy, mining], dtype=torch.float64)
    options = {"strategy": strategy, "mining": mining, "margin": 0.5, "alpha": 0.25}
    assert torch.equal(function(TARGET, ANCHOR, reduction="none", **options), expected)
    assert function(TARGET, ANCHOR, **options).item() == expected.sum().item()
    assert function(TARGET, ANCHOR, reduction="mean", **options).item() == pytest.approx(expected.sum().item() / 3)
    for position, directions in enumerate(("rows", "columns")):
        one = function(TARGET, ANCHOR, reduction="none", directions=directions, **options)
        assert torch.equal(one, expected[position])


@both_implementations
def test_the_gradient_of_an_example_by_hand(implementation: str) -> None:
    function, options = IMPLEMENTATIONS[implementation], {"margin": 0.5, "alpha": 0.25}
    _, gradient = with_gradient(function, TARGET, ANCHOR, strategy="relative", **options)
    # Rows select (0, 2), (1, 2), (2, 1); columns select (2, 0), (2, 1), (0, 2); every hinge is active.
    expected = torch.tensor([[-2.0, 0, 2], [0, -2, 1], [1, 2, -2]], dtype=torch.float64)
    assert torch.equal(gradient, expected)
    _, gradient = with_gradient(function, TARGET, ANCHOR, strategy="absolute", **options)
    # The negatives are the same; positives 1 and 2 are below their margins, once per direction.
    assert torch.equal(gradient, expected + torch.diag(torch.tensor([2.0, 0.0, 0.0], dtype=torch.float64)))
    _, gradient = with_gradient(function, TARGET, ANCHOR, strategy="absolute", mining="all", **options)
    # All twelve hinges of negatives are active; a positive counts once for each of the two negatives per direction.
    assert torch.equal(gradient, torch.tensor([[0.0, 2, 2], [2, -4, 2], [2, 2, -4]], dtype=torch.float64))


@both_implementations
def test_soft_margins_by_hand(implementation: str) -> None:
    """With one negative, the loss is its hinge; the margins are written out."""
    function = IMPLEMENTATIONS[implementation]
    scores = torch.tensor([[0.5, 0.4], [-1.0, 1.0]], dtype=torch.float64)
    anchor = torch.tensor([[0.6, -0.2], [-1.0, 1.0]], dtype=torch.float64)
    options = {"soft": True, "reduction": "none", "directions": "rows"}
    # upper(0.8, 0.2, 2) = 0.4 / (1 + e^-12) - 0.2; in row 1, upper(2, 0.2, 2) = 0 and s - a = 0.
    relative = 0.4 / (1 + math.exp(-12)) - 0.2 + 0.8 - 0.1
    losses = function(scores, anchor, strategy="relative", **options)
    assert losses.tolist() == pytest.approx([relative, 0.0], abs=1e-15)
    # alpha 0.5: upper(0.6, 0.1, 1) and lower(-0.2, 0.1, 1), with 2 / m = 20; in row 1, upper(1) = lower(-1) = 0.
    absolute = (0.2 / (1 + math.exp(-8)) - 0.1 + 0.1) + (0.2 / (1 + math.exp(-16)) - 0.1 + 0.6)
    losses = function(scores, anchor, strategy="absolute", **options)
    assert losses.tolist() == pytest.approx([absolute, 0.0], abs=1e-15)
    losses = function(scores, anchor, strategy="both", **options)
    assert losses.tolist() == pytest.approx([(relative + absolute) / 2, 0.0], abs=1e-15)
    # A soft margin of 0 stays 0; only the score differences remain.
    assert function(scores, anchor, margin=0.0, **options).tolist() == pytest.approx([0.7, 0.0], abs=1e-15)
    assert function(scores, anchor, alpha=1.0, margin=0.1, **options)[0].item() == pytest.approx(
        0.2 / (1 + math.exp(-8)) - 0.1 + 0.1 + 0.6, abs=1e-15
    )
    assert (upper(1.0, 0.2, 1.0), lower(-1.0, 0.2, 1.0)) == (0.0, 0.0)
    assert upper(-1.0, 0.2, 1.0) == lower(1.0, 0.2, 1.0) == pytest.approx(0.2, abs=1e-8)


@both_implementations
@every_form
def test_every_form_equals_the_loops(implementation: str, strategy: str, mining: str, soft: bool) -> None:
    function = IMPLEMENTATIONS[implementation]
    for size in (1, 2, 17, 65, 130):
        scores, anchor = random_pair(size, seed=size)
        for directions, positives, alpha in (
            ("both", None, 0.5),
            ("rows", random_pair(size, seed=size + 1)[0] > 0.2, 0.3),
            ("columns", random_pair(size, seed=size + 2)[0] > -0.4, 1.0),
        ):
            n = 2 if directions == "both" else 1
            weights = torch.linspace(0.5, 1.5, n * size, dtype=torch.float64).reshape(n, size)
            options: dict[str, Any] = {"strategy": strategy, "mining": mining, "soft": soft, "alpha": alpha}
            options |= {"directions": directions, "positives": positives, "margin": 0.3}
            right = loop_boosting(scores, anchor, weights=weights, **options)
            losses, gradient = with_gradient(function, scores, anchor, weights, **options)
            torch.testing.assert_close(losses.reshape(n, size), right.losses, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(gradient, right.gradient, rtol=1e-12, atol=1e-12)
            assert not bool(gradient[right.gradient == 0].any())


@pytest.mark.native
@settings(max_examples=300)
@given(st.data())
def test_ties_masks_and_special_values(data: st.DataObject) -> None:
    """On small matrices of few values, native, reference and loops agree on all results except NaN."""
    n = data.draw(st.integers(1, 5))
    element = data.draw(st.sampled_from([VALUES, VALUES | SPECIAL]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    drawn = data.draw(st.lists(element, min_size=2 * n * n, max_size=2 * n * n))
    scores, anchor = torch.tensor(drawn, dtype=dtype).reshape(2, n, n)
    options: dict[str, Any] = {
        "strategy": data.draw(st.sampled_from(STRATEGIES)),
        "mining": data.draw(st.sampled_from(MINING)),
        "margin": data.draw(st.sampled_from([0.0, 0.25, 0.5])),
        "alpha": data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])),
        "soft": data.draw(st.booleans()),
        "directions": data.draw(st.sampled_from(["both", "rows", "columns"])),
    }
    if data.draw(st.booleans()):
        mask = data.draw(st.lists(st.booleans(), min_size=n * n, max_size=n * n))
        options["positives"] = torch.tensor(mask, dtype=torch.bool).reshape(n, n)
    right = loop_boosting(scores, anchor, **options)
    # Soft margins round; within this distance float32 may select another negative.
    assume(not options["soft"] or right.doubt > (1e-4 if dtype == torch.float32 else 1e-12))
    for name, function in IMPLEMENTATIONS.items():
        losses, gradient = with_gradient(function, scores, anchor, **options)
        torch.testing.assert_close(
            losses.double().reshape(right.losses.shape), right.losses, equal_nan=True, rtol=1e-6, atol=1e-6, msg=name
        )
        # The gradients of a non-finite loss are not defined, but the kernel must not write outside the matrix.
        if bool(right.losses.isfinite().all()):
            torch.testing.assert_close(gradient.double(), right.gradient, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.native
@settings(max_examples=40)
@given(st.integers(1, 300), st.sampled_from(STRATEGIES), st.sampled_from(MINING), st.booleans(), st.integers(0, 2**31))
def test_float32_is_as_accurate_as_plain_pytorch(size: int, strategy: str, mining: str, soft: bool, seed: int) -> None:
    scores, anchor = random_pair(size, torch.float32, seed)
    options = {"strategy": strategy, "mining": mining, "soft": soft}
    actual = with_gradient(F_itm.boosting_loss, scores, anchor, **options)
    plain = with_gradient(reference.boosting_loss, scores, anchor, **options)
    exact = with_gradient(reference.boosting_loss, scores.double(), anchor.double(), **options)
    assert_close_to_exact(actual[0], plain[0], exact[0], name=f"{strategy} {mining} losses")
    # The gradient depends on the active hinges and the selected negatives; it may differ if rounding decides them.
    if torch.equal(plain[1].double(), exact[1]):
        same = torch.equal(actual[1], plain[1])
        assert same or loop_boosting(scores, anchor, **options).doubt < 1e-6, f"{strategy} {mining} gradient"


@both_implementations
@pytest.mark.parametrize("soft", [False, True])
def test_of_equal_negatives_the_lowest_index_is_taken(implementation: str, soft: bool) -> None:
    scores, anchor = torch.full((5, 5), 0.5, dtype=torch.float64), torch.full((5, 5), 0.25, dtype=torch.float64)
    for strategy in ("relative", "absolute"):
        _, gradient = with_gradient(IMPLEMENTATIONS[implementation], scores, anchor, strategy=strategy, soft=soft)
        expected = torch.zeros(5, 5, dtype=torch.float64)
        expected[0, 1:] += 1  # anchors: columns 1 to 4; negative: row 0
        expected[1:, 0] += 1  # anchors: rows 1 to 4; negative: column 0
        expected[0, 1] += 1
        expected[1, 0] += 1
        # The gap of the positives, 0.25, is above the absolute margin of 0.1.
        expected -= 2 * torch.eye(5, dtype=torch.float64) if strategy == "relative" else 0
        assert torch.equal(gradient, expected)


@both_implementations
def test_the_hardest_is_the_largest_hinge_and_not_the_highest_score(implementation: str) -> None:
    """With fixed margins, the hardest negative has the largest s - a. Soft margins are added before the selection."""
    function = IMPLEMENTATIONS[implementation]
    scores, anchor = torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    scores[0], anchor[0] = torch.tensor([1.0, 0.9, 0.5]), torch.tensor([1.0, 0.85, 0.3])
    _, gradient = with_gradient(function, scores, anchor, directions="rows")
    assert gradient[0].tolist() == [-1.0, 0.0, 1.0]
    # The gaps differ by 0.01; the soft margins lower(-0.99, 0.1, 1) and lower(0.5, 0.1, 1) differ by nearly 0.1.
    scores[0], anchor[0] = torch.tensor([1.0, -0.87, 0.61]), torch.tensor([1.0, -0.99, 0.5])
    assert with_gradient(function, scores, anchor, directions="rows")[1][0].tolist() == [-1.0, 1.0, 0.0]
    _, gradient = with_gradient(function, scores, anchor, directions="rows", soft=True)
    assert gradient[0].tolist() == [0.0, 0.0, 1.0]


@both_implementations
@pytest.mark.parametrize("soft", [False, True])
def test_without_a_negative_the_positive_term_of_absolute_hardest_stays(implementation: str, soft: bool) -> None:
    function = IMPLEMENTATIONS[implementation]
    for n, positives in ((1, None), (4, torch.ones(4, 4, dtype=torch.bool)), (0, None)):
        scores, anchor = random_pair(n)
        for strategy in ("relative", "absolute"):
            for mining in MINING:
                options = {"strategy": strategy, "mining": mining, "positives": positives, "soft": soft}
                losses, gradient = with_gradient(function, scores, anchor, **options)
                expected = torch.zeros(2, n, dtype=torch.float64)
                if (strategy, mining) == ("absolute", "hardest"):
                    margins = [upper(a, 0.1, 1.0) if soft else 0.1 for a in anchor.diagonal().tolist()]
                    own = torch.tensor(margins, dtype=torch.float64) + anchor.diagonal() - scores.diagonal()
                    expected += own.clamp(min=0)
                torch.testing.assert_close(losses, expected, rtol=0, atol=1e-15)
                assert torch.equal(gradient, torch.diag(-2.0 * (expected[0] > 0)).to(torch.float64))


@both_implementations
def test_the_hinge_has_no_derivative_at_zero(implementation: str) -> None:
    scores = torch.tensor([[0.5, 0.25], [0.25, 0.5]], dtype=torch.float64)
    anchor = torch.tensor([[0.25, 0.5], [0.5, 0.25]], dtype=torch.float64)
    for strategy in STRATEGIES:
        for mining in MINING:
            options = {"strategy": strategy, "mining": mining, "margin": 0.5}
            losses, gradient = with_gradient(IMPLEMENTATIONS[implementation], scores, anchor, **options)
            assert not bool(losses.any())
            assert not bool(gradient.any())


@both_implementations
@every_form
def test_a_nan_of_either_branch_reaches_the_loss_of_its_anchors_and_of_no_others(
    implementation: str, strategy: str, mining: str, soft: bool
) -> None:
    function = IMPLEMENTATIONS[implementation]
    options = {"strategy": strategy, "mining": mining, "soft": soft}
    for row, column in ((2, 5), (4, 4), (0, 69), (66, 1)):
        for branch in (0, 1):
            pair = random_pair(70)
            pair[branch][row, column] = math.nan
            expected = torch.zeros(2, 70, dtype=torch.bool)
            expected[0, row] = expected[1, column] = True
            assert torch.equal(function(*pair, reduction="none", **options).isnan(), expected)
            assert math.isnan(function(*pair, **options).item())
            masked = torch.zeros(70, 70, dtype=torch.bool)
            masked[row, column] = row != column
            if row != column:
                assert not math.isnan(function(*pair, positives=masked, **options).item())
    # A NaN positive makes the loss NaN even without negatives.
    assert math.isnan(function(torch.tensor([[math.nan]]), torch.zeros(1, 1), **options).item())


@both_implementations
@every_form
def test_the_strategies_hold_together(implementation: str, strategy: str, mining: str, soft: bool) -> None:
    """Eq 13 with fixed margins: absolute >= relative, both is their mean, relative is a triplet loss of the gaps."""
    function = IMPLEMENTATIONS[implementation]
    scores, anchor = random_pair(20, seed=3)
    losses = {
        name: function(scores, anchor, strategy=name, mining=mining, soft=soft, reduction="none") for name in STRATEGIES
    }
    if strategy == "both":
        torch.testing.assert_close(losses["both"], (losses["relative"] + losses["absolute"]) / 2)
    elif not soft:
        assert bool((losses["relative"] <= losses["absolute"] + 1e-12).all())
        if strategy == "relative":
            over_gaps = F_itm.triplet_loss(scores - anchor, mining=mining, reduction="none")
            torch.testing.assert_close(losses["relative"], over_gaps)
    else:
        # Soft margins are at most the fixed ones, and approach them for anchor scores far from their optimum.
        fixed = function(scores, anchor, strategy=strategy, mining=mining, reduction="none")
        assert bool((losses[strategy] <= fixed + 1e-12).all())
        assert bool((losses[strategy] < fixed).any())


@both_implementations
@every_form
def test_no_gradient_reaches_the_anchor_scores(implementation: str, strategy: str, mining: str, soft: bool) -> None:
    scores, anchor = (part.requires_grad_() for part in random_pair(6))
    function = IMPLEMENTATIONS[implementation]
    loss = function(scores, anchor, strategy=strategy, mining=mining, soft=soft)
    of_scores, of_anchor = torch.autograd.grad(loss, (scores, anchor), allow_unused=True)
    assert bool(of_scores.any())
    assert of_anchor is None
    assert not function(scores.detach(), anchor, strategy=strategy, mining=mining, soft=soft).requires_grad


@pytest.mark.native
@every_form
def test_gradcheck(strategy: str, mining: str, soft: bool) -> None:
    scores, anchor = random_pair(7)
    mask = random_pair(7, seed=1)[0] > 0.4
    for options in ({"reduction": "none"}, {"reduction": "mean", "positives": mask}, {"directions": "columns"}):
        form = {"strategy": strategy, "mining": mining, "soft": soft, **options}
        assert torch.autograd.gradcheck(
            lambda s, form=form: F_itm.boosting_loss(s, anchor, **form), scores.clone().requires_grad_()
        )


@pytest.mark.native
@every_form
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_an_incoming_gradient_that_is_not_finite_or_zero_stays_with_its_anchor(
    strategy: str, mining: str, soft: bool, value: float
) -> None:
    scores, anchor = random_pair(66)
    options = {"strategy": strategy, "mining": mining, "soft": soft}
    weights = torch.ones(2, 66, dtype=torch.float64)
    weights[0, 65] = value
    _, gradient = with_gradient(F_itm.boosting_loss, scores, anchor, weights, **options)
    weights[0, 65] = 0.0
    without = loop_boosting(scores, anchor, weights=weights, **options).gradient
    weights.fill_(0.0)[0, 65] = 1.0
    touched = loop_boosting(scores, anchor, weights=weights, **options).gradient != 0
    assert bool(touched.any())
    torch.testing.assert_close(gradient[~touched], without[~touched])
    assert bool((gradient[touched].isfinite() == math.isfinite(value)).all())


@pytest.mark.native
def test_any_strides_are_taken_and_threads_change_nothing() -> None:
    scores, anchor = random_pair(300, torch.float32)
    mask = random_pair(300, seed=5)[0] > 0.5
    wide = torch.zeros(600, 310)
    wide[::2, 3:303] = scores
    before = torch.get_num_threads()
    try:
        for strategy, mining, soft in (("both", "hardest", True), ("both", "all", False), ("absolute", "all", True)):
            options = {"strategy": strategy, "mining": mining, "soft": soft, "positives": mask}
            torch.set_num_threads(1)
            expected = with_gradient(F_itm.boosting_loss, scores, anchor, **options)
            torch.set_num_threads(3)
            turned = {**options, "positives": mask.t().contiguous().t()}
            other = anchor.t().contiguous().t()
            actual = with_gradient(F_itm.boosting_loss, wide[::2, 3:303], other, **turned)
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.native
def test_the_native_kernels_run() -> None:
    scores, anchor = random_pair(4, torch.float32)
    with native_calls() as calls:
        F_itm.boosting_loss(scores.requires_grad_(), anchor).backward()
    assert [name for name, _ in calls] == ["boosting_loss_with_gradient", "scale_gradient"]


def test_the_module_computes_the_function() -> None:
    scores, anchor = random_pair(8)
    mask = random_pair(8, seed=1)[0] > 0.3
    options = {"strategy": "both", "mining": "all", "alpha": 0.3, "soft": True, "reduction": "mean"}
    module = BoostingLoss(0.3, directions="rows", **options)
    expected = F_itm.boosting_loss(scores, anchor, margin=0.3, directions="rows", positives=mask, **options)
    assert torch.equal(module(scores, anchor, positives=mask), expected)
    assert repr(BoostingLoss()) == (
        "BoostingLoss(margin=0.2, strategy='absolute', mining='hardest', alpha=0.5, soft=False, directions='both', "
        "reduction='sum')"
    )
    assert "alpha" not in repr(BoostingLoss(strategy="relative"))
    with pytest.raises(ValueError, match="strategy: expected one of 'relative', 'absolute', 'both', got 'rm'"):
        BoostingLoss(strategy="rm")
