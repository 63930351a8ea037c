"""Shared parts of the triplet loss tests: implementations, scores, and the comparison with the loops.

Inside: `MINING`, `IMPLEMENTATIONS`, `both_implementations`, `random_scores`, `with_gradients`, `assert_equals_loops`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import reference
from python_tests.helpers.triplets import loop_losses

MINING = ("all", "hardest", "selective", "semi_hard", "sct")
IMPLEMENTATIONS = {"native": F_itm.triplet_loss, "reference": reference.triplet_loss}

both_implementations = pytest.mark.parametrize(
    "implementation", [pytest.param("native", marks=pytest.mark.native), "reference"]
)


def random_scores(n: int, m: int | None = None, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.3 * torch.randn(n, n if m is None else m, generator=generator, dtype=torch.float64)).to(dtype)


def with_gradients(function: Any, scores: Tensor, weights: Tensor | None = None, **options: Any) -> list[Tensor]:
    """Return the losses of the anchors, the gradient of the scores, and that of `positive_scores` if given."""
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
    # Zero gradients must be exactly zero: the backward before the loss recomputes only pairs with a non-zero gradient.
    assert not bool(gradients[0][gradient == 0].any())
    if options.get("positive_scores") is not None:
        torch.testing.assert_close(gradients[1].double(), own_gradient, rtol=tolerance, atol=tolerance)
