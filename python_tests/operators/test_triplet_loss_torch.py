"""`triplet_loss` and `hardest_negatives` in PyTorch: opcheck, compile, autocast, derivatives, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import itm_fast.functional as F_itm
from itm_fast import reference
from itm_fast.ops import triplet_loss as ops
from python_tests.helpers.fragments import native_calls

OPERATORS = torch.ops.itm_fast
MINING = ("all", "hardest", "selective", "semi_hard", "sct")


def random_scores(n: int, m: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.3 * torch.randn(n, n if m is None else m, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.native
def test_gradcheck_of_hardest_negatives() -> None:
    scores = random_scores(7, dtype=torch.float64).requires_grad_()
    positives = random_scores(7, seed=2) > 0.3
    for excluded in (None, positives):
        with native_calls() as calls:
            assert torch.autograd.gradcheck(
                lambda s, excluded=excluded: [values for values, _ in F_itm.hardest_negatives(s, excluded)], (scores,)
            )
        assert {name for name, _ in calls} == {"hardest_negatives", "hardest_negatives_backward"}


@pytest.mark.parametrize("mining", [ops.kernel_mining(mining) for mining in MINING])
@pytest.mark.parametrize(("directions", "reduction"), [("both", "none"), ("rows", "sum"), ("columns", "none")])
def test_opcheck_of_the_loss(mining: str, directions: str, reduction: str) -> None:
    for dtype in (torch.float32, torch.float64):
        scores = random_scores(6, dtype=dtype)
        own = None if directions == "both" else random_scores(1, 6, dtype, seed=1)[0]
        positives = random_scores(6, seed=2) > 0.2
        options = (0.2, mining, 0.2, "batch", False, directions, reduction)
        arguments = (scores, positives, own, *options)
        torch.library.opcheck(OPERATORS.triplet_loss.default, arguments)
        loss, negatives = OPERATORS.triplet_loss(*arguments)
        arguments = (torch.ones_like(loss), scores, positives, own, negatives, *options)
        torch.library.opcheck(OPERATORS.triplet_loss_backward.default, arguments)


def test_opcheck_of_hardest_negatives() -> None:
    scores, positives = random_scores(6), random_scores(6, seed=2) > 0.2
    for mask in (None, positives):
        torch.library.opcheck(OPERATORS.hardest_negatives.default, (scores, mask))
        rows, row_indices, columns, column_indices = OPERATORS.hardest_negatives(scores, mask)
        arguments = (torch.ones_like(rows), torch.ones_like(columns), scores, row_indices, column_indices)
        torch.library.opcheck(OPERATORS.hardest_negatives_backward.default, arguments)


def test_operators_called_directly_refuse_what_does_not_fit() -> None:
    scores = random_scores(4)
    good = (0.2, "hardest", 0.01, "batch", False, "both", "sum")
    loss, negatives = OPERATORS.triplet_loss(scores, None, None, *good)
    for operator, arguments, message in (
        (OPERATORS.triplet_loss, (scores[:3], None, None, *good), "expected a square matrix"),
        (OPERATORS.triplet_loss, (scores.half(), None, None, *good), "expected float32 or float64"),
        (OPERATORS.triplet_loss, (scores, scores > 9, scores[0], *good), "one score per anchor of one direction"),
        (OPERATORS.triplet_loss, (scores, scores[:2] > 9, None, *good), "positives: expected a bool tensor"),
        (OPERATORS.triplet_loss, (scores, None, None, 0.2, "hard", *good[2:]), "mining: unknown option 'hard'"),
        (OPERATORS.triplet_loss_backward, (loss, scores, None, None, negatives[:1], *good), "negatives: expected"),
        (OPERATORS.triplet_loss_backward, (scores, scores, None, None, negatives, *good), "grad_loss: expected"),
        (OPERATORS.hardest_negatives_backward, (loss, loss, scores, negatives[0], negatives[0]), "grad_rows: expected"),
    ):
        with pytest.raises(RuntimeError, match=message):
            operator(*arguments)
    # Out-of-range indices are ignored; the kernel writes nothing for them.
    wild = torch.tensor([[7, -5, 4, 1 << 40], [99, -1, -7, 4]])
    gradient, _ = OPERATORS.triplet_loss_backward(loss, scores, None, None, wild, *good)
    assert not bool(gradient[~torch.eye(4, dtype=torch.bool)].any())


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("mining", ["all", "hardest", "selective"])
def test_compiles_whole_and_does_not_recompile(mining: str) -> None:
    compilations = []

    def count(graph: torch.fx.GraphModule, _inputs: list[Any]) -> torch.fx.GraphModule:
        compilations.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=count)
    def step(scores: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        loss = F_itm.triplet_loss(scores, mining=mining, epsilon=0.2, positives=image[:, None] == image)
        (values, _), _ = F_itm.hardest_negatives(scores)
        return loss, values.sum()

    after_third = 0
    for batch, size in enumerate((5, 8, 3, 13, 6, 21)):
        leaf = random_scores(size, seed=batch).requires_grad_()
        image = torch.arange(size) // 2
        loss, total = step(leaf, image)
        (loss + total).backward()
        exact = leaf.detach().double().requires_grad_()
        expected = reference.triplet_loss(exact, mining=mining, epsilon=0.2, positives=image[:, None] == image)
        (expected + reference.hardest_negatives(exact)[0][0].sum()).backward()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
        torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)
        if batch == 2:
            after_third = len(compilations)
    assert len(compilations) == after_third <= 3


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiles_through_inductor() -> None:
    scores, own = random_scores(9), random_scores(1, 9, seed=1)[0]

    def loss(scores: Tensor, own: Tensor) -> Tensor:
        one_sided = F_itm.triplet_loss(
            scores, directions="columns", positive_scores=own, reduction="none", mining="all"
        )
        return (2 * one_sided).sum() + F_itm.triplet_loss(scores.tanh(), reduction="mean")

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        leaves = scores.clone().requires_grad_(), own.clone().requires_grad_()
        value = function(*leaves)
        results.append((value.detach(), *torch.autograd.grad(value, leaves)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_have_losses_in_float32(dtype: torch.dtype) -> None:
    half = random_scores(20, dtype=dtype)
    expected_leaf = half.float().requires_grad_()
    expected = F_itm.triplet_loss(expected_leaf, epsilon=0.2, mining="selective")
    expected.backward()
    for enabled in (False, True):
        leaf = half.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = F_itm.triplet_loss(leaf, epsilon=0.2, mining="selective")
            (values, _), _ = F_itm.hardest_negatives(leaf)
        assert loss.dtype == values.dtype == torch.float32
        assert torch.equal(loss, expected)
        loss.backward()
        assert leaf.grad.dtype == dtype
        assert torch.equal(leaf.grad, expected_leaf.grad.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F_itm.triplet_loss(half.double()).dtype == torch.float64


def test_second_derivatives_are_an_error_and_never_a_missing_term() -> None:
    advice = "use itm_fast.reference, which is plain PyTorch"
    scores = random_scores(5).requires_grad_()
    gradient = torch.autograd.grad(F_itm.triplet_loss(scores.tanh()), scores, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=f"triplet_loss does not support second derivatives: {advice}"):
        gradient.square().sum().backward()
    (values, _), _ = F_itm.hardest_negatives(scores)
    gradient = torch.autograd.grad(values.sum(), scores, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=f"hardest_negatives does not support second derivatives: {advice}"):
        gradient.sum().backward()
    # First derivatives are correct with create_graph; the reference also supports second derivatives.
    for function in (F_itm.triplet_loss, reference.triplet_loss):
        penalty = torch.autograd.grad(function(scores.tanh()), scores, create_graph=True)[0]
        assert torch.allclose(penalty, torch.autograd.grad(reference.triplet_loss(scores.tanh()), scores)[0])
    second = torch.autograd.grad(penalty.square().sum(), scores)[0]
    assert bool(second.isfinite().all())
    assert bool(second.any())


def test_function_transforms_and_forward_mode_are_errors() -> None:
    scores = random_scores(5)
    with pytest.raises(
        RuntimeError, match=r"triplet_loss does not support torch\.func transforms: use itm_fast\.reference"
    ):
        torch.func.grad(F_itm.triplet_loss)(scores)
    with pytest.raises(RuntimeError, match=r"hardest_negatives does not support torch\.func transforms"):
        torch.func.vmap(lambda s: F_itm.hardest_negatives(s)[0][0])(scores[None])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(scores, torch.ones_like(scores))
        with pytest.raises(RuntimeError, match=r"not support forward-mode differentiation: use itm_fast\.reference"):
            F_itm.triplet_loss(dual)
        with pytest.raises(RuntimeError, match=r"not support forward-mode differentiation: use itm_fast\.reference"):
            F_itm.triplet_loss(scores, positive_scores=dual[0], directions="rows")
    expected = torch.autograd.functional.jacobian(reference.triplet_loss, scores)
    assert torch.allclose(torch.func.grad(reference.triplet_loss)(scores), expected)


@pytest.mark.parametrize("mining", MINING)
def test_the_fallback_gives_the_same_numbers(mining: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers() -> list[Tensor]:
        scores, own = random_scores(9).requires_grad_(), random_scores(1, 9, seed=1)[0].requires_grad_()
        both = F_itm.triplet_loss(scores, mining=mining, epsilon=0.2, selective_divisor="negatives", reduction="mean")
        one = F_itm.triplet_loss(
            scores.half(), mining=mining, halve=True, positive_scores=own.half(), directions="rows", margin=0.3
        )
        (values, indices), columns = F_itm.hardest_negatives(scores, positives=scores > 0.3)
        total = both + one + values.sum()
        return [both, one, values, indices, *columns, *torch.autograd.grad(total, [scores, own])]

    with native_calls() as calls:
        native = numbers()
    assert [name for name, _ in calls][:2] == ["triplet_loss_with_gradient"] * 2
    monkeypatch.setattr(ops, "use_native", lambda operator, tensor: False)
    with native_calls() as calls:
        fallback = numbers()
    assert calls == []
    for left, right in zip(native, fallback, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


GOOD = torch.zeros(3, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scores": [[1.0]]}, TypeError, "scores: expected a tensor of shape (n, m), got [[1.0]] (list)"),
        (
            {"scores": GOOD.long()},
            TypeError,
            "scores: expected a tensor of dtype float32 or float64 or bfloat16 or float16, got an int64 tensor of "
            "shape (3, 3)",
        ),
        ({"scores": GOOD[0]}, ValueError, "scores: expected shape (n, m), got a float32 tensor of shape (3,)"),
        (
            {"scores": GOOD[:2]},
            ValueError,
            "scores: expected a square matrix with the positives on its diagonal, got (2, 3)",
        ),
        ({"margin": float("nan")}, ValueError, "margin: expected a finite number, got nan"),
        ({"margin": "0.2"}, TypeError, "margin: expected a finite number, got '0.2' (str)"),
        ({"epsilon": -0.1}, ValueError, "epsilon: expected a number of at least 0, got -0.1"),
        (
            {"mining": "hard"},
            ValueError,
            "mining: expected one of 'all', 'hardest', 'selective', 'semi_hard', 'sct', got 'hard' (str)",
        ),
        (
            {"selective_divisor": "B"},
            ValueError,
            "selective_divisor: expected one of 'batch', 'negatives', got 'B' (str)",
        ),
        ({"halve": 2}, TypeError, "halve: expected True or False, got 2 (int)"),
        ({"directions": "row"}, ValueError, "directions: expected one of 'both', 'rows', 'columns', got 'row' (str)"),
        ({"reduction": None}, TypeError, "reduction: expected one of 'sum', 'mean', 'none', got None (NoneType)"),
        (
            {"positives": GOOD},
            TypeError,
            "positives: expected a tensor of dtype bool, got a float32 tensor of shape (3, 3)",
        ),
        ({"positives": GOOD[:2] > 0}, ValueError, "positives: expected shape (3, 3) like scores, got (2, 3)"),
        (
            {"positives": (GOOD > 0).to("meta")},
            ValueError,
            "positives: expected it on cpu like scores, got meta",
        ),
        (
            {"positive_scores": GOOD[0]},
            ValueError,
            "directions: expected 'rows' or 'columns' with positive_scores, which belong to one direction, got 'both'",
        ),
        (
            {"positive_scores": GOOD[0, :2], "directions": "rows"},
            ValueError,
            "positive_scores: expected shape (3,) for directions='rows', got (2,)",
        ),
        (
            {"positive_scores": GOOD[0].double(), "directions": "columns"},
            TypeError,
            "positive_scores: expected a tensor of dtype float32, got a float64 tensor of shape (3,)",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"scores": GOOD, **arguments}
    with pytest.raises(error) as caught:
        F_itm.triplet_loss(arguments.pop("scores"), **arguments)
    assert caught.type is error
    assert str(caught.value) == message


def test_bad_arguments_of_hardest_negatives() -> None:
    with pytest.raises(ValueError, match="scores: expected a square matrix"):
        F_itm.hardest_negatives(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="positives: expected a tensor of dtype bool"):
        F_itm.hardest_negatives(GOOD, GOOD)


def test_nothing_but_the_scores_is_kept_for_the_backward() -> None:
    """The graph keeps the scores and two indices per anchor, not a second matrix."""
    scores = random_scores(50).requires_grad_()
    saved = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), native_calls():
        F_itm.triplet_loss(scores, positives=None)
    own = [tensor for tensor in saved if tensor.data_ptr() != scores.data_ptr()]
    assert len(saved) == 2
    assert [tuple(tensor.shape) for tensor in own] == [(2, 50)]
