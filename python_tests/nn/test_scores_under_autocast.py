"""Scores under autocast: heads with a last linear layer compute it in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from itm_fast import models
from itm_fast.nn.similarity import wide_linear
from python_tests.helpers.bert import PIECES

SMALL = {"feature_dim": 12, "embed_dim": 32, "word_dim": 8, "vocab_size": 40}
BERT = {"bert_dim": 24, "bert_layers": 1, "bert_heads": 12, "bert_hidden_dim": 20, "bert_max_length": 16}
HEADS: list[tuple[str, dict[str, Any]]] = [
    ("sgraf", {**SMALL, "alignment_dim": 32, "module": "sgr", "n_regions": 5}),
    ("sgraf", {**SMALL, "alignment_dim": 32, "module": "saf", "n_regions": 5}),
    ("camp", SMALL),
    ("oscar", {"feature_dim": 12, "vocab_size": len(PIECES), **BERT}),
    ("oscar", {"feature_dim": 12, "vocab_size": len(PIECES), **BERT, "probability": True}),
]


def scores_of(model: Any, dtype: torch.dtype | None) -> Tensor:
    torch.manual_seed(1)
    regions, words = torch.randn(40, 5, 12), torch.randint(len(PIECES), (20, 6))
    with torch.no_grad(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        return model(regions, words, torch.full((20,), 6))


@pytest.mark.parametrize(("name", "options"), HEADS)
def test_scores_are_not_rounded_to_16_bits(name: str, options: dict[str, Any]) -> None:
    """Rounded scores tie by the hundred, and a tie counts as an error."""
    torch.manual_seed(0)
    model = models.create(name, **options).eval()
    if name == "oscar":
        # The small first weights give pairs nearly the same state.
        for parameter in model.text_encoder.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.3)
    plain, found = scores_of(model, None), scores_of(model, torch.bfloat16)
    assert found.dtype == torch.float32
    assert len(found.unique()) > 0.9 * found.numel()
    torch.testing.assert_close(found, plain, atol=0.1, rtol=0.02)


def test_the_last_layer_is_at_least_float32() -> None:
    layer, inputs = nn.Linear(3, 2), torch.randn(4, 3)
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        for weights in (layer, nn.Linear(3, 2, bias=False)):
            rows = inputs.to(dtype)
            with torch.autocast("cpu", torch.bfloat16):
                found = wide_linear(weights, rows)
            assert found.dtype == expected
            parts = [None if one is None else one.to(expected) for one in (weights.weight, weights.bias)]
            torch.testing.assert_close(found, nn.functional.linear(rows.to(expected), *parts))
    assert wide_linear(layer.bfloat16(), inputs).dtype == torch.float32
