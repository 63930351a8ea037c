"""Zero rows receive no gradient and do not change the scale of other gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import Fragments, reference
from itm_fast.ops.cross_attention import AGGREGATIONS, FOCAL_MODES, NORMALIZATIONS
from python_tests.helpers.fragments import native_calls, random_fragments
from python_tests.helpers.regulators import random_parameters

Operator = Callable[[Fragments, Fragments], Tensor]
QUERIES, CONTEXTS = [5, 3, 4, 2], [6, 4, 5, 3]
# Padding at the end of a set, an all-zero set, and a single row.
ZERO_QUERIES, ZERO_CONTEXTS = [3, 4, 5, 6, 7], [4, 5, 6, 7, 8, 9, 11]


def sets(dtype: torch.dtype) -> tuple[Fragments, Fragments]:
    queries, contexts = random_fragments(QUERIES, 16, dtype, 1), random_fragments(CONTEXTS, 16, dtype, 2)
    queries.values[ZERO_QUERIES] = 0
    contexts.values[ZERO_CONTEXTS] = 0
    return queries, contexts


def gradients(operator: Operator, dtype: torch.dtype, incoming: Tensor | None = None) -> list[Tensor]:
    """Return the gradients of both sides; check that they are exactly zero in zero rows."""
    queries, contexts = sets(dtype)
    leaves = [part.values.clone().requires_grad_() for part in (queries, contexts)]
    result = operator(queries.with_values(leaves[0]), contexts.with_values(leaves[1]))
    if incoming is None:
        incoming = torch.randn(result.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = list(torch.autograd.grad(result, leaves, incoming.to(result.dtype)))
    for gradient, rows in zip(found, (ZERO_QUERIES, ZERO_CONTEXTS), strict=True):
        assert torch.equal(gradient[rows], torch.zeros_like(gradient[rows]))
    return found


def sparse() -> Tensor:
    """Make an incoming gradient with one non-zero pair in four."""
    incoming = torch.zeros(len(QUERIES), len(CONTEXTS), dtype=torch.float64)
    incoming[torch.arange(4), torch.tensor([1, 0, 3, 2])] = torch.tensor([1.0, -2.0, 0.5, 1.5], dtype=torch.float64)
    return incoming


@pytest.mark.parametrize("incoming", [None, sparse()], ids=["all pairs", "few pairs"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("normalization", "focal", "aggregation"),
    [
        *itertools.product(NORMALIZATIONS, [None], ["mean"]),
        *itertools.product(["clipped_l2norm"], FOCAL_MODES, AGGREGATIONS),
    ],
)
def test_scores(
    normalization: str, focal: str | None, aggregation: str, dtype: torch.dtype, incoming: Tensor | None
) -> None:
    options: dict[str, Any] = {"normalization": normalization, "focal": focal, "aggregation": aggregation}
    with native_calls() as calls:
        native = gradients(lambda q, c: F_itm.cross_attention_scores(q, c, **options), dtype, incoming)
    assert "cross_attention_scores_backward" in [name for name, _ in calls]
    # Exact gradients of the rows rounded to `dtype`.
    exact = gradients(
        lambda q, c: reference.cross_attention_scores(q.to(torch.float64), c.to(torch.float64), **options),
        dtype,
        incoming,
    )
    packed = gradients(
        lambda q, c: reference.cross_attention_scores_packed(q.to(torch.float64), c.to(torch.float64), **options),
        dtype,
        incoming,
    )
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 0.1)
    for found, other, expected in zip(native, packed, exact, strict=True):
        assert 0 < expected.abs().max() < 100
        assert torch.linalg.vector_norm((found - expected).double()) < tolerance * torch.linalg.vector_norm(
            expected.double()
        )
        torch.testing.assert_close(other, expected)


def regulated(module: Any, dtype: torch.dtype, setting: str) -> Operator:
    parameters = random_parameters(setting, 16, 8, seed=4).to(torch.promote_types(dtype, torch.float32))
    return lambda q, c: module.regulated_scores(q, c, parameters)


def aligned(module: Any, dtype: torch.dtype) -> Operator:
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    return lambda q, c: module.cross_attention_alignments(q, c, weight, None)


@pytest.mark.parametrize(
    "make", [aligned, *(partial(regulated, setting=name) for name in ("scan", "rcr3", "rar2, learned", "rcar2"))]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_regulators(make: Callable[[Any, torch.dtype], Operator], dtype: torch.dtype) -> None:
    wide = make(reference, torch.float64)
    exact = gradients(lambda q, c: wide(q.to(torch.float64), c.to(torch.float64)), dtype)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 0.15)
    for found, expected in zip(gradients(make(F_itm, dtype), dtype), exact, strict=True):
        assert 0 < expected.abs().max() < 100
        assert torch.linalg.vector_norm((found - expected).double()) < tolerance * torch.linalg.vector_norm(
            expected.double()
        )


def reference_operators(dtype: torch.dtype) -> dict[str, Operator]:
    parameters = random_parameters("rcar2", 16, 8, seed=4).to(dtype)
    step = parameters.correspondences[0]
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    return {
        "scores": reference.cross_attention_scores,
        "packed scores": reference.cross_attention_scores_packed,
        "regulated": lambda q, c: reference.regulated_scores(q, c, parameters),
        "packed regulated": lambda q, c: reference.regulated_scores_packed(q, c, parameters),
        "alignments": lambda q, c: reference.cross_attention_alignments(q, c, [weight] * 2, correspondences=[step]),
        "packed alignments": lambda q, c: reference.cross_attention_alignments_packed(q, c, [weight]),
    }


@pytest.mark.parametrize("name", reference_operators(torch.float64))
def test_the_reference_in_float16(name: str) -> None:
    """The constant that avoids division by zero is below the smallest float16."""
    exact = gradients(reference_operators(torch.float64)[name], torch.float64)
    for found, expected in zip(gradients(reference_operators(torch.float16)[name], torch.float16), exact, strict=True):
        assert found.dtype == torch.float16
        assert torch.linalg.vector_norm(found.double() - expected) < 0.05 * torch.linalg.vector_norm(expected)


def test_a_row_without_direction_is_exactly_zero() -> None:
    """Only a row that is exactly zero loses its gradient; a tiny row keeps it."""
    queries, contexts = sets(torch.float64)
    contexts.values[4, 0] = 1e-100
    leaf = contexts.values.clone().requires_grad_()
    scores = F_itm.cross_attention_scores(queries, contexts.with_values(leaf))
    (gradient,) = torch.autograd.grad(scores.sum(), leaf)
    assert gradient[4].abs().max() > 0
    assert gradient[5].abs().max() == 0


@pytest.mark.parametrize("slope", [0.1, 0.0])
def test_second_derivatives_of_the_reference_are_finite(slope: float) -> None:
    """With slope 0, all products of a context may be clipped, as in a zero row."""
    queries, contexts = sets(torch.float64)
    contexts.values[0] = -queries.values.abs().sum(0)
    parameters = random_parameters("rcar2, guidance", 16, 8)
    for operator in (
        partial(reference.cross_attention_scores, negative_slope=slope),
        partial(reference.regulated_scores, parameters=parameters, negative_slope=slope),
    ):
        leaves = [part.values.clone().requires_grad_() for part in (queries, contexts)]
        scores = operator(queries.with_values(leaves[0]), contexts.with_values(leaves[1]))
        first = torch.autograd.grad(scores.sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(one.square().sum() for one in first), leaves)
        assert all(one.isfinite().all() for one in (*first, *second))
        assert all(float(one.abs().max()) > 0 for one in second)
