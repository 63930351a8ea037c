"""`hardest_negatives`: values and gradients of the reference and the native kernel against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import itm_fast.functional as F_itm
from itm_fast import reference
from python_tests.helpers.triplet_cases import (
    random_scores,
)
from python_tests.helpers.triplets import loop_hardest
from python_tests.operators.score_strategies import SPECIAL, VALUES

HARDEST = [pytest.param(F_itm.hardest_negatives, marks=pytest.mark.native), reference.hardest_negatives]


@pytest.mark.parametrize("function", HARDEST)
@settings(max_examples=150)
@given(st.data())
def test_hardest_negatives_equal_the_loops(function: Any, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 7))
    element = data.draw(st.sampled_from([VALUES, VALUES | SPECIAL]))
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
