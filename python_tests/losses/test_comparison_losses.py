"""The losses that the papers compare with: values and gradients against loops, and edge cases."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from itm_fast import losses
from python_tests.helpers.comparison_loops import loop_losses, numerical_gradient

# Module name and settings; every form of a loss appears at least once.
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("CMPMLoss", {}),
    ("CMPMLoss", {"scale": 16.0}),
    ("PolynomialLoss", {}),
    ("PolynomialLoss", {"margin": 0.5, "positive": (0.4, -0.3), "negative": (0.1, 0.2, 0.3, 0.5)}),
    ("PolynomialLoss", {"largest_positive": 0.3}),
    ("DMLLoss", {}),
    ("DMLLoss", {"scale": 8.0}),
    ("DINOLoss", {}),
    ("DINOLoss", {"inverse": True, "scale": 5.0, "anchor_scale": 12.0}),
    ("DINOLoss", {"divergence": True, "scale": 5.0, "anchor_scale": 4.0}),
    ("DINOLoss", {"inverse": True, "divergence": True, "scale": 10.0, "anchor_scale": 10.0}),
    ("RKDLoss", {}),
    ("RKDLoss", {"normalize": False}),
    ("RKDLoss", {"normalize": False, "weight": 10.0}),
    ("SoftRankLoss", {}),
    ("SoftRankLoss", {"length": 4, "scale": 3.0}),
    ("SoftRankLoss", {"length": 1}),
    ("SoftRankLoss", {"transfer": "hard"}),
    ("SoftRankLoss", {"transfer": "dbl", "length": 4}),
)
DISTILLATION = ("DMLLoss", "DINOLoss", "RKDLoss", "SoftRankLoss")
every_form = pytest.mark.parametrize(("name", "options"), FORMS)
every_loss = pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in FORMS))
every_distillation = pytest.mark.parametrize("name", DISTILLATION)


def make(name: str, **options: Any) -> Any:
    return getattr(losses, name)(**options)


def random_matrices(name: str, n: int, seed: int = 0) -> list[np.ndarray]:
    """Return scores in [-1, 1] (n, n), and a second matrix for losses that take the scores of an anchor branch."""
    random = np.random.default_rng(seed)
    return [np.tanh(0.5 * random.standard_normal((n, n))) for _ in range(2 if name in DISTILLATION else 1)]


def tensors(matrices: list[np.ndarray], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.from_numpy(matrix).to(dtype) for matrix in matrices]


@every_form
def test_value_and_gradient_are_those_of_the_formula(name: str, options: dict[str, Any]) -> None:
    for n, masked in ((2, False), (5, False), (5, True), (7, True)):
        matrices = random_matrices(name, n, seed=n)
        mask = np.random.default_rng(n + 1).random((n, n)) < 0.4 if masked else None
        positives = None if mask is None else torch.from_numpy(mask)
        weights = np.linspace(0.5, 1.5, 2 * n).reshape(2, n)
        inputs = tensors(matrices)
        inputs[0].requires_grad_()
        each = make(name, reduction="none", **options)(*inputs, positives=positives)
        exact = loop_losses(name, *matrices, mask=mask, **options)
        torch.testing.assert_close(each.detach(), torch.from_numpy(exact), rtol=1e-12, atol=1e-13)
        (each * torch.from_numpy(weights)).sum().backward()

        def weighted(
            moved: np.ndarray, rest: list[np.ndarray] = matrices[1:], mask: Any = mask, weights: Any = weights
        ) -> float:
            return float((weights * loop_losses(name, moved, *rest, mask=mask, **options)).sum())

        gradient = torch.from_numpy(numerical_gradient(weighted, matrices[0]))
        torch.testing.assert_close(inputs[0].grad, gradient, rtol=1e-6, atol=1e-7)


@every_form
def test_reductions_and_directions(name: str, options: dict[str, Any]) -> None:
    matrices = random_matrices(name, 6)
    exact, inputs = loop_losses(name, *matrices, **options), tensors(matrices)
    for directions, wanted in (("both", exact), ("rows", exact[:1]), ("columns", exact[1:])):
        values = {
            reduction: make(name, directions=directions, reduction=reduction, **options)(*inputs)
            for reduction in ("sum", "mean", "none")
        }
        assert values["sum"].item() == pytest.approx(wanted.sum(), rel=1e-12)
        assert values["mean"].item() == pytest.approx(wanted.sum() / 6, rel=1e-12)
        assert values["none"].shape == ((2, 6) if directions == "both" else (6,))
        assert values["none"].flatten().tolist() == pytest.approx(wanted.flatten().tolist(), rel=1e-12)


def by_hand(name: str, *matrices: list[list[float]], **options: Any) -> list[float]:
    inputs = [torch.tensor(matrix, dtype=torch.float64) for matrix in matrices]
    values: list[float] = make(name, directions="rows", reduction="none", **options)(*inputs).tolist()
    return values


def test_examples_by_hand() -> None:
    """Two pairs for which the formulae are written out; ln 3 gives the first anchor odds of 3 to 1."""
    scores, anchor = [[math.log(3.0), 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, math.log(3.0)]]
    own = 0.75 * math.log(0.75 / (1 + 1e-8)) + 0.25 * math.log(0.25 / 1e-8)
    even = 0.5 * math.log(0.5 / (1 + 1e-8)) + 0.5 * math.log(0.5 / 1e-8)
    assert by_hand("CMPMLoss", scores) == pytest.approx([own, even], rel=1e-12)
    to_target = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    to_even = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert by_hand("DMLLoss", scores, anchor) == pytest.approx([to_target, to_even], rel=1e-12)
    # For lists of two, the probabilities of the permutations are the softmax.
    assert by_hand("SoftRankLoss", scores, anchor) == pytest.approx([to_target, to_even], rel=1e-12)
    crossed = [-(math.log(0.75) + math.log(0.25)) / 2, math.log(2.0)]
    assert by_hand("DINOLoss", scores, anchor, scale=1.0, anchor_scale=1.0) == pytest.approx(crossed, rel=1e-12)
    inverse = [math.log(2.0), -(math.log(0.75) + math.log(0.25)) / 2]
    values = by_hand("DINOLoss", scores, anchor, scale=1.0, anchor_scale=1.0, inverse=True)
    assert values == pytest.approx(inverse, rel=1e-12)
    # 1 - s is 0.5, 1, 1, 1.5 (mean 1) and 0, 2, 2, 4 (mean 2); the differences are 0.5, 0, 0, -0.5.
    distances = by_hand("RKDLoss", [[0.5, 0.0], [0.0, -0.5]], [[1.0, -1.0], [-1.0, -3.0]])
    assert distances == pytest.approx([0.125 / 2, 0.125 / 2], rel=1e-12)
    # Without normalisation, the differences are 0.5, -1, -1, -2.5; the Huber loss is linear beyond 1.
    distances = by_hand("RKDLoss", [[0.5, 0.0], [0.0, -0.5]], [[1.0, -1.0], [-1.0, -3.0]], normalize=False)
    assert distances == pytest.approx([(0.125 + 0.5) / 2, (0.5 + 2.0) / 2], rel=1e-12)
    # The first negative is informative only due to the margin, the second is not informative.
    polynomials = by_hand("PolynomialLoss", [[0.5, 0.4], [0.1, 0.5]])
    positive, negative = 0.5 - 0.7 * 0.5 + 0.2 * 0.25, 0.03 - 0.4 * 0.4 + 0.9 * 0.16
    assert polynomials == pytest.approx([positive + negative, 0.0], rel=1e-12)


def test_projections_of_embeddings_give_cmpm_as_published() -> None:
    """Each direction projects unnormalised embeddings of one modality onto unit vectors of the other."""
    generator = torch.Generator().manual_seed(0)
    images, captions = 2 * torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
    rows = images @ torch.nn.functional.normalize(captions, dim=1).t()
    columns = torch.nn.functional.normalize(images, dim=1) @ captions.t()
    mask = np.zeros((6, 6), dtype=bool)
    mask[1, 4] = mask[4, 1] = True
    each = losses.CMPMLoss(reduction="none")(rows, column_scores=columns, positives=torch.from_numpy(mask))
    exact = [loop_losses("CMPMLoss", matrix.numpy(), mask=mask)[side] for side, matrix in enumerate((rows, columns))]
    torch.testing.assert_close(each, torch.from_numpy(np.array(exact)), rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match=r"^column_scores: expected shape \(6, 6\) like scores, got \(6, 5\)$"):
        losses.CMPMLoss()(rows, column_scores=columns[:, :5])


@every_distillation
def test_only_the_target_branch_receives_a_gradient(name: str) -> None:
    target, anchor = tensors(random_matrices(name, 5))
    target.requires_grad_()
    anchor.requires_grad_()
    make(name)(target, anchor).backward()
    assert anchor.grad is None
    assert float(target.grad.abs().max()) > 0


@pytest.mark.parametrize("name", ["DMLLoss", "RKDLoss", "SoftRankLoss"])
def test_equal_branches_have_nothing_to_learn(name: str) -> None:
    target = tensors(random_matrices(name, 5))[0].requires_grad_()
    value = make(name)(target, target.detach().clone())
    value.backward()
    assert abs(value.item()) < 1e-14
    assert float(target.grad.abs().max()) < 1e-14


def test_rkd_hands_on_proportions_alone() -> None:
    target, anchor = tensors(random_matrices("RKDLoss", 5))
    plain = losses.RKDLoss()(target, anchor)
    # Halves the distances: 1 - s becomes (1 - s) / 2.
    assert losses.RKDLoss()(target, (1 + anchor) / 2).item() == pytest.approx(plain.item(), rel=1e-12)


def test_equal_scores_are_ranked_by_their_index() -> None:
    """If the list of the anchor branch ends among equal scores, it keeps the lowest indices."""
    anchor = torch.tensor([[0.5, 0.5, 0.5, 0.5]] * 4, dtype=torch.float64)
    target = torch.tensor([[0.9, 0.1, -0.3, 0.7]] * 4, dtype=torch.float64)
    each = losses.SoftRankLoss(length=2, directions="rows", reduction="none")(target, anchor)
    odds = math.exp(0.9) / (math.exp(0.9) + math.exp(0.1))
    assert each.tolist() == pytest.approx([0.5 * math.log(0.5 / odds) + 0.5 * math.log(0.5 / (1 - odds))] * 4)


@every_form
@settings(max_examples=25)
@given(st.data())
def test_ties_and_masks(name: str, options: dict[str, Any], data: st.DataObject) -> None:
    """Few distinct values cause many ties. The mask is arbitrary: it may miss diagonal entries or cover whole rows."""
    n = data.draw(st.integers(1, 4))
    count = 2 if name in DISTILLATION else 1
    drawn = data.draw(st.lists(st.sampled_from([-0.5, 0.0, 0.25, 0.5]), min_size=count * n * n, max_size=count * n * n))
    matrices = list(np.array(drawn).reshape(count, n, n))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n * n, max_size=n * n))).reshape(n, n)
    each = make(name, reduction="none", **options)(*tensors(matrices), positives=torch.from_numpy(mask))
    exact = loop_losses(name, *matrices, mask=mask, **options)
    torch.testing.assert_close(each, torch.from_numpy(exact), rtol=1e-12, atol=1e-12)


@every_form
def test_no_negatives(name: str, options: dict[str, Any]) -> None:
    """If no pair is a negative (a batch of one, or all pairs positive), only the terms of the positives remain, and
    gradients are finite.
    """
    for n, positives in ((1, None), (4, torch.ones(4, 4, dtype=torch.bool))):
        matrices = random_matrices(name, n, seed=3)
        mask = None if positives is None else positives.numpy()
        inputs = tensors(matrices)
        inputs[0].requires_grad_()
        each = make(name, reduction="none", **options)(*inputs, positives=positives)
        exact = torch.from_numpy(loop_losses(name, *matrices, mask=mask, **options))
        torch.testing.assert_close(each.detach(), exact, rtol=1e-12, atol=1e-13)
        each.sum().backward()
        assert bool(inputs[0].grad.isfinite().all())
        if name in ("PolynomialLoss", "DMLLoss", "DINOLoss", "SoftRankLoss"):
            assert not bool(each.detach().any())
            assert not bool(inputs[0].grad.any())
    assert make(name, reduction="sum", **options)(*[torch.zeros(0, 0)] * len(matrices)).item() == 0


@every_loss
def test_a_mask_without_its_diagonal_is_one_with_it(name: str) -> None:
    matrices = random_matrices(name, 6)
    mask = torch.rand(6, 6, generator=torch.Generator().manual_seed(1)) < 0.3
    without, whole = mask & ~torch.eye(6, dtype=torch.bool), mask | torch.eye(6, dtype=torch.bool)
    each = [make(name, reduction="none")(*tensors(matrices), positives=chosen) for chosen in (without, whole)]
    assert torch.equal(*each)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    inputs = tensors(random_matrices(name, 8), dtype)
    value = make(name)(*inputs)
    assert value.dtype == torch.float32
    exact = loop_losses(name, *(matrix.double().numpy() for matrix in inputs)).sum()
    assert value.item() == pytest.approx(exact, rel=2e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert make(name)(*inputs).item() == value.item()


@every_loss
def test_a_score_that_is_not_a_number_shows(name: str) -> None:
    matrices = random_matrices(name, 4)
    matrices[0][1, 2] = math.nan
    if name in DISTILLATION:
        # Ranking lists hold the best scores of the anchor branch: put this pair among them.
        matrices[1][1, 2] = 0.999
    each = make(name, reduction="none")(*tensors(matrices))
    assert bool(each[0, 1].isnan())
    assert bool(each[1, 2].isnan())


@pytest.mark.parametrize("transfer", ["soft", "hard", "dbl"])
def test_an_anchor_score_that_is_not_a_number_shows_in_every_form(transfer: str) -> None:
    """The loss is NaN in both directions and in no other row, even if the anchor branch only gives an order."""
    target, anchor = tensors(random_matrices("SoftRankLoss", 5))
    anchor[1, 2] = math.nan
    each = make("SoftRankLoss", reduction="none", transfer=transfer)(target, anchor)
    assert torch.equal(each.isnan().nonzero(), torch.tensor([[0, 1], [1, 2]]))


def test_large_scores_stay_finite() -> None:
    """The softmax stays finite for scores whose exponential overflows float32."""
    target = (1e3 * torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0))).requires_grad_()
    for name in ("CMPMLoss", "DMLLoss", "DINOLoss", "SoftRankLoss"):
        inputs = (target[0],) if name == "CMPMLoss" else (target[0], target[1].detach())
        value = make(name)(*inputs)
        (gradient,) = torch.autograd.grad(value, target)
        assert math.isfinite(value.item()), name
        assert bool(gradient.isfinite().all()), name


@every_loss
def test_bad_inputs_are_named(name: str) -> None:
    loss, inputs = make(name), tensors(random_matrices(name, 4))
    rest = inputs[1:]
    square = r"^scores: expected a square matrix with the positives on its diagonal, got \(4, 3\)$"
    with pytest.raises(ValueError, match=square):
        loss(inputs[0][:, :3], *rest)
    with pytest.raises(TypeError, match=r"^scores: expected a tensor of shape \(n, m\), got \[1\] \(list\)$"):
        loss([1], *rest)
    with pytest.raises(TypeError, match=r"^scores: expected a tensor of dtype float32 or .*, got an int64 tensor"):
        loss(inputs[0].long(), *rest)
    with pytest.raises(ValueError, match=r"^positives: expected shape \(4, 4\) like scores, got \(4, 1\)$"):
        loss(*inputs, positives=torch.ones(4, 1, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"^positives: expected a tensor of dtype bool, got a float64 tensor"):
        loss(*inputs, positives=inputs[0])
    with pytest.raises(ValueError, match=r"^positives: expected it on cpu like scores, got meta$"):
        loss(*inputs, positives=torch.ones(4, 4, dtype=torch.bool, device="meta"))


@pytest.mark.parametrize("name", [*DISTILLATION, "BoostingLoss"])
def test_anchor_scores_that_do_not_fit_are_named(name: str) -> None:
    loss, (target, anchor) = make(name), tensors(random_matrices("DMLLoss", 4))
    with pytest.raises(ValueError, match=r"^anchor_scores: expected shape \(4, 4\) like scores, got \(5, 5\)$"):
        loss(target, torch.zeros(5, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"^anchor_scores: expected it on cpu like scores, got meta$"):
        loss(target, anchor.to("meta"))
    with pytest.raises(TypeError, match=r"^anchor_scores: expected a tensor of dtype float64, got a float32 tensor"):
        loss(target, anchor.float())
    with pytest.raises(TypeError, match=r"^anchor_scores: expected a tensor of shape \(n, m\), got None"):
        loss(target, None)


@pytest.mark.parametrize(
    ("name", "options", "kind", "message"),
    [
        ("CMPMLoss", {"scale": 0}, ValueError, "scale: expected a number other than 0, got 0.0"),
        ("CMPMLoss", {"directions": "up"}, ValueError,
         "directions: expected one of 'both', 'rows', 'columns', got 'up' (str)"),
        ("DMLLoss", {"scale": -1.0}, ValueError, "scale: expected a number of at least 0, got -1.0"),
        ("DMLLoss", {"reduction": None}, TypeError,
         "reduction: expected one of 'sum', 'mean', 'none', got None (NoneType)"),
        ("DINOLoss", {"anchor_scale": math.nan}, ValueError, "anchor_scale: expected a finite number, got nan"),
        ("DINOLoss", {"inverse": 1}, TypeError, "inverse: expected True or False, got 1 (int)"),
        ("RKDLoss", {"normalize": None}, TypeError, "normalize: expected True or False, got None (NoneType)"),
        ("DINOLoss", {"divergence": "yes"}, TypeError, "divergence: expected True or False, got 'yes' (str)"),
        ("RKDLoss", {"weight": -1}, ValueError, "weight: expected a number of at least 0, got -1.0"),
        ("SoftRankLoss", {"transfer": "darkrank"}, ValueError,
         "transfer: expected one of 'soft', 'hard', 'dbl', got 'darkrank' (str)"),
        ("PolynomialLoss", {"largest_positive": math.nan}, ValueError,
         "largest_positive: expected a finite number, got nan"),
        ("SoftRankLoss", {"length": 7}, ValueError, "length: expected a number from 1 to 6, got 7"),
        ("SoftRankLoss", {"length": 2.0}, TypeError, "length: expected a whole number, got 2.0 (float)"),
        ("PolynomialLoss", {"margin": math.inf}, ValueError, "margin: expected a finite number, got inf"),
        ("PolynomialLoss", {"positive": ()}, TypeError,
         "positive: expected the coefficients of a polynomial, got () (tuple)"),
        ("PolynomialLoss", {"negative": (0.1, "x")}, TypeError,
         "negative[1]: expected a finite number, got 'x' (str)"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(name: str, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        make(name, **options)
    assert str(error.value) == message


def test_modules_say_what_they_are() -> None:
    assert repr(losses.DINOLoss(inverse=True)) == (
        "DINOLoss(scale=10.0, anchor_scale=25.0, inverse=True, divergence=False, directions='both', reduction='sum')"
    )
    assert repr(losses.PolynomialLoss(reduction="mean")) == (
        "PolynomialLoss(margin=0.2, positive=(0.5, -0.7, 0.2), negative=(0.03, -0.4, 0.9), largest_positive=None, "
        "directions='both', reduction='mean')"
    )


@every_loss
def test_losses_compile(name: str) -> None:
    inputs = tensors(random_matrices(name, 5), torch.float32)
    compiled = torch.compile(make(name), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs), make(name)(*inputs))
