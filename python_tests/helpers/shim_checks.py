"""Compare the kernels in the shim with the reference. Each check raises AssertionError."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itm_fast import reference
from python_tests.helpers.shim import (
    BoostingKernels,
    OneLaunchKernels,
    ProductKernels,
    RetrievalKernels,
    TripletKernels,
)
from python_tests.helpers.tolerance import assert_close_to_exact

SPECIAL = [math.nan, math.inf, -math.inf]


def choose(values: list[float], shape: tuple[int, ...], seed: int, dtype: torch.dtype, rare: float = 0.0) -> Tensor:
    """Draw from few values, so that there are many ties; an entry is NaN or infinite with probability `rare`."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.tensor(values, dtype=dtype)[torch.randint(len(values), shape, generator=generator)]
    special = torch.tensor(SPECIAL, dtype=dtype)[torch.randint(3, shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < rare, special, table)


def array(tensor: Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.contiguous().numpy()


def assert_equal(actual: Tensor, right: Tensor, name: str) -> None:
    def message(difference: str) -> str:
        return f"{name}: wrong numbers\n{difference}"

    torch.testing.assert_close(actual, right, rtol=0, atol=0, equal_nan=True, msg=message)


def reference_gradients(scores: Tensor, grad_loss: Tensor, **options: Any) -> list[Tensor]:
    """Return the loss, the gradient of the scores, and that of `positive_scores` if given."""
    inputs = [scores.clone().requires_grad_()]
    if options.get("positive_scores") is not None:
        inputs.append(options["positive_scores"].to(scores.dtype).clone().requires_grad_())
        options = {**options, "positive_scores": inputs[1]}
    loss = reference.triplet_loss(inputs[0], **options)
    return [loss.detach(), *torch.autograd.grad(loss, inputs, grad_loss.to(scores.dtype))]


def check_triplet(
    kernels: TripletKernels, scores: Tensor, *, large: bool = False, seed: int = 0, exact: bool = False, **options: Any
) -> None:
    """Check the loss and gradients of `triplet_loss`: equal to the reference (`exact`), or at most twice its error."""
    arrays = (array(options.get("positives")), array(options.get("positive_scores")))
    rest = {name: value for name, value in options.items() if name not in ("positives", "positive_scores")}
    loss, negatives = kernels.forward(array(scores), *arrays, large=large, seed=seed, **rest)
    # Few-bit weights, so that sums of few-digit numbers stay exact.
    weights = (torch.arange(loss.size, dtype=scores.dtype) % 3 + 1).reshape(loss.shape) / 2
    plain = reference_gradients(scores, weights, **options)
    gradients = kernels.backward(weights.numpy(), array(scores), negatives, *arrays, large=large, seed=seed, **rest)
    actual = [torch.from_numpy(part) for part in (loss, *gradients) if part is not None]
    assert len(actual) == len(plain)
    names = ("loss", "gradient of the scores", "gradient of the positives")
    # The gradients of a non-finite loss are not defined.
    count = len(plain) if bool(plain[0].isfinite().all()) else 1
    if exact:
        for name, a, p in list(zip(names, actual, plain, strict=False))[:count]:
            assert_equal(a, p.reshape(a.shape), f"triplet_loss, {options.get('mining')}: {name}")
        return
    double = {name: value.double() if name == "positive_scores" else value for name, value in options.items()}
    precise = reference_gradients(scores.double(), weights, **double)
    for name, a, p, e in list(zip(names, actual, plain, precise, strict=False))[:count]:
        assert_close_to_exact(a, p, e, name=f"{options.get('mining')} {name}")


def check_boosting(
    kernels: BoostingKernels,
    scores: Tensor,
    anchor_scores: Tensor,
    *,
    large: bool = False,
    seed: int = 0,
    exact: bool = False,
    **options: Any,
) -> None:
    """Check the loss and gradient of `boosting_loss`: equal to the reference (`exact`), or at most twice its error."""
    mask = array(options.get("positives"))
    rest = {name: value for name, value in options.items() if name != "positives"}
    pair = array(scores), array(anchor_scores)
    loss, negatives = kernels.forward(*pair, mask, large=large, seed=seed, **rest)
    weights = (torch.arange(loss.size, dtype=scores.dtype) % 3 + 1).reshape(loss.shape) / 2
    gradient = kernels.backward(weights.numpy(), *pair, negatives, mask, large=large, seed=seed, **rest)

    def plain(dtype: torch.dtype) -> list[Tensor]:
        leaf = scores.detach().clone().to(dtype).requires_grad_()
        value = reference.boosting_loss(leaf, anchor_scores.to(dtype), **options)
        return [value.detach(), *torch.autograd.grad(value, leaf, weights.to(dtype))]

    near, right = plain(scores.dtype), plain(torch.float64)
    names = [
        f"boosting_loss, {options.get('strategy')}, {options.get('mining')}: {part}" for part in ("loss", "gradient")
    ]
    for name, a, p, e in zip(names, map(torch.from_numpy, (loss, gradient)), near, right, strict=True):
        # The gradients of a non-finite loss are not defined.
        if name.endswith("gradient") and not bool(near[0].isfinite().all()):
            continue
        if exact:
            assert_equal(a, p.reshape(a.shape), name)
        else:
            assert_close_to_exact(a.reshape(p.shape), p, e, name=name)


def check_one_launch(kernels: OneLaunchKernels, scores: Tensor, anchor_scores: Tensor, **options: Any) -> None:
    """Check that losses and gradients of one launch equal the reference, on numbers with exact sums."""
    shared = {name: value for name, value in options.items() if name in ("mining", "margin")}
    run = {name: value for name, value in options.items() if name in ("blocks", "seed", "large")}
    for name in ("triplet_loss", "boosting_loss") if options["mining"] in ("all", "hardest") else ("triplet_loss",):
        others = [anchor_scores] if name == "boosting_loss" else []
        launch = kernels.boosting if others else kernels.triplet
        loss, _, gradient = launch(array(scores), *map(array, others), **shared, **run)
        leaf = scores.detach().clone().requires_grad_()
        right = getattr(reference, name)(leaf, *others, **shared)
        assert_equal(torch.from_numpy(loss), right.detach(), f"{name} in one launch: loss")
        (of_scores,) = torch.autograd.grad(right, leaf)
        assert_equal(torch.from_numpy(gradient), of_scores, f"{name} in one launch: gradient")


def check_scaling(kernels: OneLaunchKernels, dtype: type) -> None:
    """Check that `scale_gradient` multiplies numbers other than zero, and changes no bit if the factor is 1."""
    gradient = np.random.default_rng(0).choice([0.0, 0.0, -1.5, 2.0], 1000).astype(dtype)
    for factor in (1.0, -0.3, 0.0, math.inf, math.nan):
        scaled = kernels.scale(gradient, factor)
        with np.errstate(invalid="ignore"):
            right = np.where(gradient == 0, gradient, gradient * np.array(factor, dtype))
        assert_equal(torch.from_numpy(scaled), torch.from_numpy(right), "scale_gradient")
    special = np.array([math.nan, math.inf, -0.0, 1e-45], dtype)
    assert kernels.scale(special, 1.0).tobytes() == special.tobytes(), "scale_gradient: wrong bits"


def check_hardest(
    kernels: TripletKernels, scores: Tensor, positives: Tensor | None, *, large: bool = False, seed: int = 0
) -> None:
    """Check the values, indices and gradient of `hardest_negatives`, which are exact."""
    values, indices = kernels.hardest_negatives(array(scores), array(positives), large=large, seed=seed)
    sides = reference.hardest_negatives(scores, positives)
    for side, (right_values, right_indices) in enumerate(sides):
        assert_equal(torch.from_numpy(values[side]), right_values, "hardest_negatives: values")
        assert_equal(torch.from_numpy(indices[side]), right_indices, "hardest_negatives: indices")
    grad = np.arange(1, values.size + 1, dtype=values.dtype).reshape(values.shape)
    expected = np.zeros_like(array(scores))
    for anchor in range(len(scores)):
        if indices[0, anchor] >= 0:
            expected[anchor, indices[0, anchor]] += grad[0, anchor]
        if indices[1, anchor] >= 0:
            expected[indices[1, anchor], anchor] += grad[1, anchor]
    actual = kernels.hardest_negatives_backward(grad, indices, large=large, seed=seed)
    assert_equal(torch.from_numpy(actual), torch.from_numpy(expected), "hardest_negatives: gradient")


def check_ranks(
    kernels: RetrievalKernels, scores: Tensor, owner: Tensor, *, large: bool = False, seed: int = 0
) -> None:
    """Check the ranks under both tie rules."""
    for ties in ("pessimistic", "optimistic"):
        ranks = kernels.ranks(array(scores), array(owner), ties, large=large, seed=seed)
        for actual, right in zip(ranks, reference.retrieval_ranks(scores, owner, ties), strict=True):
            assert_equal(torch.from_numpy(actual), right, f"retrieval_ranks, {ties}")


def check_product(
    kernels: ProductKernels, rows: int, columns: int, depth: int, *, transposed: bool = False, half: bool = False,
    seed: int = 0,
) -> None:  # fmt: skip
    """Check a product of small integers, which is exact in any summation order."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float16 if half else torch.bfloat16
    left = torch.randint(-4, 5, (rows, depth), generator=generator).to(dtype)
    right = torch.randint(-4, 5, (columns, depth), generator=generator).to(dtype)
    given = right.t().contiguous() if transposed else right
    bits = [part.view(torch.int16).numpy().view(np.uint16) for part in (left, given)]
    actual = kernels.product(*bits, transposed=transposed, half=half, seed=seed)
    assert_equal(torch.from_numpy(actual), left.float() @ right.float().t(), "product")
