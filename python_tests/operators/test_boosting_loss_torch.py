"""`boosting_loss` in PyTorch: opcheck, compile, autocast, derivatives, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import itm_fast.functional as F_itm
from itm_fast import reference
from itm_fast.ops import boosting_loss as ops
from python_tests.helpers.boosting import MINING, STRATEGIES, random_pair
from python_tests.helpers.fragments import native_calls

OPERATORS = torch.ops.itm_fast


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mining", MINING)
@pytest.mark.parametrize(("directions", "reduction"), [("both", "none"), ("rows", "sum"), ("columns", "none")])
def test_opcheck(strategy: str, mining: str, directions: str, reduction: str) -> None:
    for dtype, soft in ((torch.float32, False), (torch.float64, True)):
        scores, anchor = random_pair(6, dtype)
        positives = scores > 0.4 if soft else None
        options = (strategy, mining, 0.2, 0.3, soft, directions, reduction)
        arguments = (scores, anchor, positives, *options)
        torch.library.opcheck(OPERATORS.boosting_loss.default, arguments)
        loss, negatives = OPERATORS.boosting_loss(*arguments)
        arguments = (torch.ones_like(loss), scores, anchor, positives, negatives, *options)
        torch.library.opcheck(OPERATORS.boosting_loss_backward.default, arguments)


def test_operators_called_directly_refuse_what_does_not_fit() -> None:
    scores, anchor = random_pair(4, torch.float32)
    good = ("both", "hardest", 0.2, 0.5, False, "both", "sum")
    loss, negatives = OPERATORS.boosting_loss(scores, anchor, None, *good)
    assert negatives.shape == (2, 2, 4)
    forward, backward = OPERATORS.boosting_loss, OPERATORS.boosting_loss_backward
    for operator, arguments, message in (
        (forward, (scores[:3], anchor, None, *good), "scores: expected a square matrix"),
        (forward, (scores, anchor[:3], None, *good), "anchor_scores: expected the shape and the dtype of scores"),
        (forward, (scores, anchor.double(), None, *good), "anchor_scores: expected the shape and the dtype of scores"),
        (forward, (scores.half(), anchor.half(), None, *good), "scores: expected float32 or float64"),
        (forward, (scores, anchor, scores, *good), "positives: expected a bool tensor"),
        (forward, (scores, anchor, None, "rm", *good[1:]), "strategy: unknown option 'rm'"),
        (forward, (scores, anchor, None, "both", "selective", *good[2:]), "mining: unknown option 'selective'"),
        (backward, (loss, scores, anchor, None, negatives[:1], *good), "negatives: expected the second result"),
        (backward, (scores, scores, anchor, None, negatives, *good), "grad_loss: expected the shape of the loss"),
    ):
        with pytest.raises(RuntimeError, match=message):
            operator(*arguments)
    # Out-of-range indices are ignored; the kernel writes nothing for them.
    wild = torch.tensor([[7, -5, 4, 1 << 40], [99, -1, -7, 4]]).expand(2, 2, 4).contiguous()
    gradient = backward(loss, scores, anchor, None, wild, *good)
    assert not bool(gradient[~torch.eye(4, dtype=torch.bool)].any())


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(("strategy", "mining", "soft"), [("absolute", "hardest", False), ("both", "all", True)])
def test_compiles_whole_and_does_not_recompile(strategy: str, mining: str, soft: bool) -> None:
    compilations = []
    options: dict[str, Any] = {"strategy": strategy, "mining": mining, "soft": soft}

    def count(graph: torch.fx.GraphModule, _inputs: list[Any]) -> torch.fx.GraphModule:
        compilations.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=count)
    def step(scores: Tensor, anchor: Tensor, image: Tensor) -> Tensor:
        return F_itm.boosting_loss(scores, anchor, positives=image[:, None] == image, **options)

    after_third = 0
    for batch, size in enumerate((5, 8, 3, 13, 6, 21)):
        leaf, anchor = random_pair(size, torch.float32, seed=batch)
        image = torch.arange(size) // 2
        loss = step(leaf.requires_grad_(), anchor, image)
        loss.backward()
        exact = leaf.detach().double().requires_grad_()
        expected = reference.boosting_loss(exact, anchor.double(), positives=image[:, None] == image, **options)
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)
        if batch == 2:
            after_third = len(compilations)
    assert len(compilations) == after_third <= 3


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiles_through_inductor() -> None:
    scores, anchor = random_pair(9, torch.float32)

    def loss(scores: Tensor) -> Tensor:
        each = F_itm.boosting_loss(scores, anchor, strategy="both", reduction="none", soft=True)
        return (2 * each).sum() + F_itm.boosting_loss(scores.tanh(), anchor, mining="all", reduction="mean")

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        leaf = scores.clone().requires_grad_()
        value = function(leaf)
        results.append((value.detach(), *torch.autograd.grad(value, leaf)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_have_losses_in_float32(dtype: torch.dtype) -> None:
    half, anchor = random_pair(20, dtype)
    expected_leaf = half.float().requires_grad_()
    expected = F_itm.boosting_loss(expected_leaf, anchor.float(), strategy="both", soft=True)
    expected.backward()
    for enabled in (False, True):
        leaf = half.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = F_itm.boosting_loss(leaf, anchor, strategy="both", soft=True)
        assert loss.dtype == torch.float32
        assert torch.equal(loss, expected)
        loss.backward()
        assert leaf.grad.dtype == dtype
        assert torch.equal(leaf.grad, expected_leaf.grad.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F_itm.boosting_loss(half.double(), anchor.double()).dtype == torch.float64


def test_second_derivatives_transforms_and_forward_mode_are_errors() -> None:
    advice = r"use itm_fast\.reference"
    scores, anchor = random_pair(5, torch.float32)
    scores.requires_grad_()
    gradient = torch.autograd.grad(F_itm.boosting_loss(scores.tanh(), anchor), scores, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=f"boosting_loss does not support second derivatives: {advice}"):
        gradient.square().sum().backward()
    penalty = torch.autograd.grad(reference.boosting_loss(scores.tanh(), anchor), scores, create_graph=True)[0]
    torch.testing.assert_close(penalty, gradient)
    assert bool(torch.autograd.grad(penalty.square().sum(), scores)[0].isfinite().all())
    with pytest.raises(RuntimeError, match=f"boosting_loss does not support torch.func transforms: {advice}"):
        torch.func.grad(F_itm.boosting_loss)(scores.detach(), anchor)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(scores.detach(), torch.ones_like(scores))
        with pytest.raises(RuntimeError, match=f"not support forward-mode differentiation: {advice}"):
            F_itm.boosting_loss(dual, anchor)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mining", MINING)
def test_the_fallback_gives_the_same_numbers(strategy: str, mining: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers() -> list[Tensor]:
        scores, anchor = random_pair(9, torch.float32)
        scores.requires_grad_()
        plain = F_itm.boosting_loss(scores, anchor, strategy=strategy, mining=mining, reduction="mean")
        soft = F_itm.boosting_loss(
            scores.half(), anchor.half(), strategy=strategy, mining=mining, soft=True, positives=anchor > 0.5
        )
        return [plain, soft, *torch.autograd.grad(plain + soft, scores)]

    with native_calls() as calls:
        native = numbers()
    assert [name for name, _ in calls][:2] == ["boosting_loss_with_gradient"] * 2
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
            {"scores": GOOD[:2]},
            ValueError,
            "scores: expected a square matrix with the positives on its diagonal, got (2, 3)",
        ),
        ({"anchor_scores": None}, TypeError, "anchor_scores: expected a tensor of shape (n, m), got None (NoneType)"),
        ({"anchor_scores": GOOD[:2]}, ValueError, "anchor_scores: expected shape (3, 3) like scores, got (2, 3)"),
        (
            {"anchor_scores": GOOD.double()},
            TypeError,
            "anchor_scores: expected a tensor of dtype float32, got a float64 tensor of shape (3, 3)",
        ),
        ({"anchor_scores": GOOD.to("meta")}, ValueError, "anchor_scores: expected it on cpu like scores, got meta"),
        (
            {"strategy": "rm"},
            ValueError,
            "strategy: expected one of 'relative', 'absolute', 'both', got 'rm' (str)",
        ),
        ({"mining": "semi_hard"}, ValueError, "mining: expected one of 'all', 'hardest', got 'semi_hard' (str)"),
        ({"margin": float("inf")}, ValueError, "margin: expected a finite number, got inf"),
        ({"margin": -0.1}, ValueError, "margin: expected a number of at least 0, got -0.1"),
        ({"alpha": 1.5}, ValueError, "alpha: expected a number of at most 1, got 1.5"),
        ({"alpha": -0.5}, ValueError, "alpha: expected a number of at least 0, got -0.5"),
        ({"alpha": "half"}, TypeError, "alpha: expected a finite number, got 'half' (str)"),
        ({"soft": 1}, TypeError, "soft: expected True or False, got 1 (int)"),
        ({"directions": "row"}, ValueError, "directions: expected one of 'both', 'rows', 'columns', got 'row' (str)"),
        ({"reduction": None}, TypeError, "reduction: expected one of 'sum', 'mean', 'none', got None (NoneType)"),
        (
            {"positives": GOOD},
            TypeError,
            "positives: expected a tensor of dtype bool, got a float32 tensor of shape (3, 3)",
        ),
        ({"positives": GOOD[:2] > 0}, ValueError, "positives: expected shape (3, 3) like scores, got (2, 3)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"scores": GOOD, "anchor_scores": GOOD, **arguments}
    with pytest.raises(error) as caught:
        F_itm.boosting_loss(arguments.pop("scores"), arguments.pop("anchor_scores"), **arguments)
    assert caught.type is error
    assert str(caught.value) == message


def test_no_second_matrix_is_kept_for_the_backward() -> None:
    scores, anchor = random_pair(50, torch.float32)
    scores.requires_grad_()
    saved = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), native_calls():
        F_itm.boosting_loss(scores, anchor, strategy="both")
    kept = {scores.data_ptr(), anchor.data_ptr()}
    own = [tensor for tensor in saved if tensor.data_ptr() not in kept]
    assert len(saved) == 3
    assert [tuple(tensor.shape) for tensor in own] == [(2, 2, 50)]
