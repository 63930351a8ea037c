"""Rows of exact zeros, such as padding or blank pictures, do not inflate gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast import models
from itm_fast.nn import l2norm

SIZES = {"vocab_size": 30, "feature_dim": 12, "embed_dim": 16, "word_dim": 8}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("scan", {}), ("scan", {"direction": "i2t"}), ("scan", {"regulator": "rcar", "steps": 2}), ("bfan", {}),
    ("chan", {}), ("vsrn", {}), ("sgraf", {"n_regions": 5}), ("dbl", {}), ("vsepp", {}), ("vse_infty", {}),
    ("camp", {"alignment_dim": 6, "regulator": "rcar", "regulator_dropout": 0.0}), ("camp", {"head": "cosine"}),
    ("naaf", {}), ("esa", {}), ("pfan", {"feature_dim": 8}), ("chan", {"region_attention": True}),
    ("saem", {"attention_dropout": 0.0, "phrase_dropout": 0.0}),
    ("scan", {"image_encoder": "residual"}), ("vsepp", {"image_encoder": "projected_residual"}),
    ("fdf", {"host": "scan", "conversions": 2}), ("fdf", {"host": "vse_infty", "conversions": 2}),
]  # fmt: skip


def gradient_norm(name: str, settings: dict[str, Any], features: Tensor) -> float:
    """Return the largest norm of the gradient of all weights in the first three steps on three pairs."""
    torch.manual_seed(0)
    host = {**SIZES, "image_encoder": "linear"}
    options = {**settings, "host_options": host} if name == "fdf" else {**SIZES, **settings}
    model = models.create(name, **options)
    optimizer = torch.optim.Adam(model.parameters(), 1e-5)
    token_ids, lengths = torch.randint(4, 30, (3, 6)), torch.tensor([6, 4, 3])
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        F_itm.triplet_loss(model(features, token_ids, lengths), margin=0.2, mining="hardest").backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        norms.append(float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in gradients]))))
        optimizer.step()
    assert all(norm == norm for norm in norms)
    return max(norms)


@pytest.mark.parametrize(("name", "settings"), MODELS)
def test_zero_regions_and_images_leave_gradients_as_they_are(name: str, settings: dict[str, Any]) -> None:
    features = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1))
    ordinary = gradient_norm(name, settings, features)
    padded, blank = features.clone(), features.clone()
    padded[:, 3:] = 0
    blank[1] = 0
    for changed in (padded, blank):
        assert 0 < gradient_norm(name, settings, changed) < 100 * ordinary


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_zero_vector_receives_no_gradient(dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1] = 0
    leaf = x.clone().requires_grad_()
    out = l2norm(leaf)
    assert torch.equal(out[1], torch.zeros(6, dtype=dtype))
    (gradient,) = torch.autograd.grad(out.float().sum(), leaf)
    assert torch.equal(gradient[1], torch.zeros(6, dtype=dtype))
    others = x[[0, 2, 3]].clone().requires_grad_()
    (expected,) = torch.autograd.grad(l2norm(others).float().sum(), others)
    assert torch.equal(gradient[[0, 2, 3]], expected)
