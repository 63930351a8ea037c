"""Losses whose forward writes their gradient too: when that is so, and what the backward makes of it.

Only CUDA has such kernels. Here the operators are put together from those of the CPU, which give the same numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.boosting import random_pair
from helpers.devices import ONE_LAUNCH_STEP, inputs_of, run_case
from helpers.fragments import native_calls
from helpers.one_launch import OPERATORS, implemented_on_the_cpu
from helpers.processes import ROOT
from helpers.triplet_cases import MINING, random_scores
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.ops import one_launch


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(one_launch, "_DEVICES", ("cpu",))
    with implemented_on_the_cpu():
        yield


def names_of(calls: list[Any]) -> list[str]:
    """The operators that a loss called, without those that stand in for one launch here."""
    names = [name for name, _ in calls]
    return [name for i, name in enumerate(names) if not (i > 0 and names[i - 1].endswith("_with_gradient"))]


def losses(mining: str) -> list[tuple[str, Callable[..., Tensor]]]:
    anchor = random_pair(9, torch.float32, seed=4)[0]
    found: list[tuple[str, Callable[..., Tensor]]] = [
        ("triplet_loss", lambda scores, **options: F_itm.triplet_loss(scores, mining=mining, epsilon=0.2, **options))
    ]
    if mining in ("all", "hardest"):
        found.append(
            ("boosting_loss", lambda scores, **options: F_itm.boosting_loss(scores, anchor, mining=mining, **options))
        )
    return found


@pytest.mark.parametrize("mining", MINING)
@pytest.mark.parametrize("factor", [1.0, 0.5, -3.0, 0.0, math.inf, math.nan])
def test_the_gradient_is_that_of_two_launches(mining: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, loss in losses(mining):
        results = []
        for up_to in (8192, 0):
            monkeypatch.setattr(one_launch, "UP_TO", up_to)
            leaf = random_scores(9, dtype=torch.float32).requires_grad_()
            with native_calls() as calls:
                value = loss(leaf)
                (value * factor).backward()
            found = [n for n, _ in calls if n == "scale_gradient" or n.startswith(name)]
            assert (f"{name}_with_gradient" in found) == ("scale_gradient" in found) == (up_to > 0)
            results.append((value.detach(), leaf.grad))
        assert torch.equal(results[0][0], results[1][0])
        torch.testing.assert_close(results[0][1], results[1][1], equal_nan=True)


@pytest.mark.parametrize("mining", MINING)
def test_a_second_backward_computes_the_gradient_again(mining: str) -> None:
    for name, loss in losses(mining):
        leaf = random_scores(9, dtype=torch.float32).requires_grad_()
        value = loss(leaf, reduction="mean")
        (first,) = torch.autograd.grad(2 * value, leaf, retain_graph=True)
        kept = first.clone()
        first.zero_()  # It is the caller's.
        with native_calls() as calls:
            (second,) = torch.autograd.grad(2 * value, leaf)
        assert [n for n, _ in calls] == [f"{name}_backward"]
        torch.testing.assert_close(second, kept)
        assert bool(kept.any())


def test_separate_positives_have_their_gradient_too() -> None:
    scores, own = random_scores(5, 8, torch.float32), random_scores(1, 5, torch.float32, seed=1)[0]
    results = []
    for one in (True, False):
        leaves = scores.clone().requires_grad_(), own.clone().requires_grad_()
        # One loss per anchor takes two launches.
        value = F_itm.triplet_loss(
            leaves[0], positive_scores=leaves[1], directions="rows", reduction="sum" if one else "none"
        )
        with native_calls() as calls:
            results.append(torch.autograd.grad(0.5 * value.sum(), leaves))
        assert names_of(calls) == (["scale_gradient", "scale_gradient"] if one else ["triplet_loss_backward"])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_step_from_vectors_to_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA graphs are captured of on a GPU (test_devices.py): scores, loss with its gradient, sparse backward."""
    results = []
    for up_to in (8192, 0):
        monkeypatch.setattr(one_launch, "UP_TO", up_to)
        with native_calls() as calls:
            results.append(run_case(F_itm, ONE_LAUNCH_STEP, inputs_of(ONE_LAUNCH_STEP, 0, 5, torch.float32, "cpu")))
        if up_to > 0:
            assert set(names_of(calls)) - {"triplet_loss_backward"} == set(ONE_LAUNCH_STEP.operators)
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)
        assert bool(one.any())


def test_without_need_no_gradient_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def used(leaf: Tensor, **options: Any) -> list[str]:
        with native_calls() as calls:
            F_itm.triplet_loss(leaf, **options)
        return names_of(calls)

    leaf = random_scores(6, dtype=torch.float32).requires_grad_()
    assert used(leaf) == ["triplet_loss_with_gradient"]
    assert used(leaf.detach()) == ["triplet_loss"]
    with torch.no_grad():
        assert used(leaf) == ["triplet_loss"]
    assert used(leaf, reduction="none") == ["triplet_loss"]
    monkeypatch.setattr(one_launch, "UP_TO", 5)
    assert used(leaf) == ["triplet_loss"]
    monkeypatch.setattr(one_launch, "_DEVICES", ("cuda",))
    monkeypatch.setattr(one_launch, "UP_TO", 8192)
    assert used(leaf) == ["triplet_loss"]


def test_compiled_graphs_keep_to_two_launches() -> None:
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
    assert int(re.search(r"kOneLaunchUpTo = (\d+);", header)[1]) == one_launch.UP_TO
