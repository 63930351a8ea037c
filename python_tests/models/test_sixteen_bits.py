"""Models with weights of 16 bits: `model.to(torch.bfloat16)` scores and trains without autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from itm_fast import models

SMALL = {"feature_dim": 12, "embed_dim": 32, "word_dim": 8, "vocab_size": 40}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("vsepp", SMALL),
    ("esa", SMALL),
    ("vse_infty", SMALL),
    ("saem", {**SMALL, "attention_dropout": 0.0, "attention_heads": 2, "attention_hidden_dim": 16}),
    ("camp", SMALL),
    ("camp", {**SMALL, "head": "cosine"}),
    ("camp", {**SMALL, "regulator": "rcar", "alignment_dim": 16, "regulator_dropout": 0.0}),
    ("sgraf", {**SMALL, "alignment_dim": 16, "module": "sgr", "n_regions": 5}),
    ("scan", {**SMALL, "regulator": "rcar", "alignment_dim": 16, "regulator_dropout": 0.0}),
    ("fdf", {"host": "vse_infty", "host_options": SMALL, "conversions": 2}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "options"), MODELS)
def test_scores_and_gradients_are_near_those_of_float32(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = models.create(name, **options)
    regions, words, lengths = torch.randn(6, 5, 12), torch.randint(40, (6, 7)), torch.tensor([7, 5, 3, 7, 4, 2])
    weights = torch.randn(6, 6)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    found = []
    for values in (torch.float32, dtype):
        model = model.to(values)
        model.zero_grad()
        scores = model(regions.to(values), words, lengths)
        assert scores.dtype == torch.float32
        (weights * scores).sum().backward()
        gradient = torch.cat([one.grad.flatten().float() for one in model.parameters() if one.grad is not None])
        found.append((scores.detach(), gradient))
    (plain, expected), (scores, gradient) = found
    torch.testing.assert_close(scores, plain, rtol=0, atol=0.05)
    assert torch.nn.functional.cosine_similarity(gradient, expected, dim=0) > 0.95
