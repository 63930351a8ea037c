"""Losses whose forward also writes the gradient: when this applies, and how the backward uses it.

test_cuda_one_launch.py tests the single launch on CUDA.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.ops import one_pass
from itm_fast.ops.boosting_loss import MINING as BOOSTING_MINING
from itm_fast.ops.boosting_loss import STRATEGIES
from itm_fast.ops.triplet_loss import kernel_mining
from python_tests.helpers.boosting import random_pair
from python_tests.helpers.devices import ONE_LAUNCH_STEP, inputs_of, run_case
from python_tests.helpers.fragments import native_calls
from python_tests.helpers.processes import ROOT
from python_tests.helpers.stand_in import stand_in
from python_tests.helpers.triplet_cases import MINING, random_scores

OPERATORS = torch.ops.itm_fast


@pytest.fixture
def in_two(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return a switch: True leaves the gradient to the backward."""
    return lambda two: monkeypatch.setattr(one_pass, "_DEVICES", () if two else ("cpu",))


def losses(mining: str) -> list[tuple[str, Callable[..., Tensor]]]:
    anchor = random_pair(9, torch.float32, seed=4)[0]
    found: list[tuple[str, Callable[..., Tensor]]] = [
        ("triplet_loss", lambda scores, **options: F_itm.triplet_loss(scores, mining=mining, epsilon=0.2, **options))
    ]
    if mining in BOOSTING_MINING:
        found.append(
            ("boosting_loss", lambda scores, **options: F_itm.boosting_loss(scores, anchor, mining=mining, **options))
        )
    return found


@pytest.mark.parametrize("mining", MINING)
@pytest.mark.parametrize("factor", [1.0, 0.5, -3.0, 0.0, math.inf, math.nan])
def test_the_gradient_is_that_of_two_calls(mining: str, factor: float, in_two: Callable[[bool], None]) -> None:
    for name, loss in losses(mining):
        results = []
        for two in (False, True):
            in_two(two)
            leaf = random_scores(9, dtype=torch.float32).requires_grad_()
            with native_calls() as calls:
                value = loss(leaf)
                (value * factor).backward()
            assert [n for n, _ in calls] == (
                [name, f"{name}_backward"] if two else [f"{name}_with_gradient", "scale_gradient"]
            )
            results.append((value.detach(), leaf.grad))
        assert torch.equal(results[0][0], results[1][0])
        torch.testing.assert_close(results[0][1], results[1][1], equal_nan=True)


@pytest.mark.parametrize("mining", MINING)
def test_a_second_backward_gives_the_same_bits(mining: str) -> None:
    for name, loss in losses(mining):
        leaf = random_scores(9, dtype=torch.float32).requires_grad_()
        value = loss(leaf, reduction="mean")
        (first,) = torch.autograd.grad(0.3 * value, leaf, retain_graph=True)
        kept = first.clone()
        first.zero_()  # The caller may change the gradient.
        with native_calls() as calls:
            (second,) = torch.autograd.grad(0.3 * value, leaf)
        assert [n for n, _ in calls] == [f"{name}_with_gradient", "scale_gradient"]
        assert torch.equal(second, kept)
        assert bool(kept.any())


def test_separate_positives_have_their_gradient_too() -> None:
    scores, own = random_scores(5, 8, torch.float32), random_scores(1, 5, torch.float32, seed=1)[0]
    results = []
    for one in (True, False):
        leaves = scores.clone().requires_grad_(), own.clone().requires_grad_()
        # `reduction="none"` takes two calls.
        value = F_itm.triplet_loss(
            leaves[0], positive_scores=leaves[1], directions="rows", reduction="sum" if one else "none"
        )
        with native_calls() as calls:
            results.append(torch.autograd.grad(0.5 * value.sum(), leaves))
        assert [n for n, _ in calls] == (["scale_gradient", "scale_gradient"] if one else ["triplet_loss_backward"])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_step_from_vectors_to_their_gradients(in_two: Callable[[bool], None]) -> None:
    """Run scores, loss with gradient and sparse backward; test_devices.py captures this step as a CUDA graph."""
    results = []
    for two in (False, True):
        in_two(two)
        with native_calls() as calls:
            results.append(run_case(F_itm, ONE_LAUNCH_STEP, inputs_of(ONE_LAUNCH_STEP, 0, 5, torch.float32, "cpu")))
        assert ({n for n, _ in calls} == set(ONE_LAUNCH_STEP.operators)) == (not two)
    for one, two_calls in zip(*results, strict=True):
        torch.testing.assert_close(one, two_calls)
        assert bool(one.any())


def test_without_need_no_gradient_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def used(leaf: Tensor, **options: Any) -> list[str]:
        with native_calls() as calls:
            F_itm.triplet_loss(leaf, **options)
        return [name for name, _ in calls]

    leaf = random_scores(6, dtype=torch.float32).requires_grad_()
    assert used(leaf) == ["triplet_loss_with_gradient"]
    assert used(leaf.detach()) == ["triplet_loss"]
    with torch.no_grad():
        assert used(leaf) == ["triplet_loss"]
    assert used(leaf, reduction="none") == ["triplet_loss"]
    # The limit applies only to CUDA.
    monkeypatch.setattr(one_pass, "UP_TO_ON_CUDA", 5)
    assert used(leaf) == ["triplet_loss_with_gradient"]
    with stand_in():
        assert used(leaf.to("cuda")) == ["triplet_loss"]
        monkeypatch.setattr(one_pass, "UP_TO_ON_CUDA", 6)
        assert used(leaf.to("cuda")) == ["triplet_loss_with_gradient"]


@pytest.mark.parametrize("size", [1, 2, 9, 70, 200])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mining", MINING)
def test_one_pass_finds_what_a_scan_and_a_gradient_find(mining: str, masked: bool, size: int) -> None:
    """Results are equal bit for bit, at sizes of several blocks and with partly filled vectors."""
    scores, anchor = random_pair(size, torch.float32, seed=size)
    positives = random_scores(size, dtype=torch.float32, seed=3) > 0.6 if masked else None
    for directions in ("both", "rows", "columns"):
        options = (0.2, kernel_mining(mining), 0.2, "batch", False, directions, "mean")
        found = OPERATORS.triplet_loss_with_gradient(scores, positives, None, *options)
        loss, negatives = OPERATORS.triplet_loss(scores, positives, None, *options)
        gradients = OPERATORS.triplet_loss_backward(torch.ones_like(loss), scores, positives, None, negatives, *options)
        assert all(map(torch.equal, found, (loss, negatives, *gradients)))
        for strategy, soft in product(STRATEGIES, (False, True)):
            if mining not in BOOSTING_MINING:
                continue
            options = (strategy, mining, 0.2, 0.5, soft, directions, "sum")
            found = OPERATORS.boosting_loss_with_gradient(scores, anchor, positives, *options)
            loss, negatives = OPERATORS.boosting_loss(scores, anchor, positives, *options)
            gradient = OPERATORS.boosting_loss_backward(
                torch.ones_like(loss), scores, anchor, positives, negatives, *options
            )
            assert all(map(torch.equal, found, (loss, negatives, gradient)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaling_leaves_zeros_alone(dtype: torch.dtype) -> None:
    values = torch.randn(70_001, generator=torch.Generator().manual_seed(0), dtype=dtype)
    values[values.abs() < 0.7] = 0.0
    values[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    for factor in (1.0, -0.3, 0.0, math.inf, math.nan):
        for count in (0, 1, 5, 16, 33, 70_001):
            found = values[:count].clone()
            OPERATORS.scale_gradient(found, torch.tensor(factor, dtype=dtype))
            expected = torch.where(values[:count] == 0, values[:count], values[:count] * factor)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_compiled_graphs_keep_to_two_calls() -> None:
    names: list[str] = []

    def record(graph: torch.fx.GraphModule, _inputs: list[Any]) -> torch.fx.GraphModule:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    leaf = random_scores(6, dtype=torch.float32).requires_grad_()
    value = torch.compile(F_itm.triplet_loss, fullgraph=True, backend=record)(leaf)
    value.backward()
    torch._dynamo.reset()
    assert not any("with_gradient" in name for name in names)
    expected = leaf.detach().clone().requires_grad_()
    F_itm.triplet_loss(expected).backward()
    assert torch.equal(leaf.grad, expected.grad)


def test_half_precision_and_losses_that_share_their_scores() -> None:
    leaf = random_scores(7, dtype=torch.bfloat16).requires_grad_()
    anchor = random_pair(7, torch.bfloat16)[1]
    total = F_itm.triplet_loss(leaf) + 0.25 * F_itm.boosting_loss(leaf, anchor)
    total.backward()
    wide = leaf.detach().float().requires_grad_()
    parts = F_itm.triplet_loss(wide, reduction="none").sum()
    (parts + 0.25 * F_itm.boosting_loss(wide, anchor.float(), reduction="none").sum()).backward()
    assert leaf.grad.dtype == torch.bfloat16
    torch.testing.assert_close(leaf.grad.float(), wide.grad, rtol=2**-7, atol=2**-7)


def test_opcheck() -> None:
    scores, anchor = random_pair(6, torch.float32)
    options = (0.2, "selective", 0.2, "batch", False, "rows", "mean")
    own = random_scores(1, 6, torch.float32)[0]
    for arguments in ((scores, scores > 0.5, None, *options), (scores, None, own, *options)):
        torch.library.opcheck(OPERATORS.triplet_loss_with_gradient.default, arguments)
    boosting = ("both", "hardest", 0.2, 0.5, True, "both", "sum")
    torch.library.opcheck(OPERATORS.boosting_loss_with_gradient.default, (scores, anchor, None, *boosting))
    torch.library.opcheck(OPERATORS.scale_gradient.default, (scores.clone(), torch.tensor(0.5)))


def test_the_kernels_take_what_is_sent_to_them() -> None:
    header = (ROOT / "csrc/include/itm_fast/cuda/triplet_launch.h").read_text()
    assert int(re.search(r"kOneLaunchUpTo = (\d+);", header)[1]) == one_pass.UP_TO_ON_CUDA
