"""Encoding no images and no captions, as a process without a share of a batch does, reaches all weights.

Captions without words train beside others, and alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from itm_fast import models
from itm_fast.fragments import Fragments
from itm_fast.nn.reasoning import SimilarityReasoning

SIZES = {"vocab_size": 20, "feature_dim": 12, "embed_dim": 16, "word_dim": 8}
BERT = {"text_encoder": "bert", "bert_dim": 16, "bert_layers": 1, "bert_heads": 2, "bert_hidden_dim": 16}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("scan", {}), ("scan", {"regulator": "rcar"}), ("scan", {"image_encoder": "residual"}),
    ("scan", {"image_encoder": "patches"}), ("scan", BERT), ("bfan", {}), ("camp", {}), ("chan", {}),
    ("chan", {"region_attention": True}), ("dbl", {}), ("esa", {}), ("laps", {"n_regions": 4}), ("naaf", {}),
    ("pfan", {"feature_dim": 8}), ("rvsepp", {}), ("saem", {}), ("sgraf", {"n_regions": 4}), ("vse_infty", {}),
    ("vsepp", {}), ("vsrn", {}),
]  # fmt: skip


def total(embeddings: Any) -> Tensor:
    if isinstance(embeddings, tuple):
        return sum((total(part) for part in embeddings), torch.zeros(()))
    return (embeddings.values if isinstance(embeddings, Fragments) else embeddings).float().sum()


def learning(model: models.MatchingModel, n: int) -> dict[str, Tensor]:
    """Return the gradients that encoding n images and n captions gives, by name."""
    model.zero_grad()
    token_ids = torch.zeros(n, 6, dtype=torch.int64)
    images, captions = model.encode(torch.randn(n, 4, 12), token_ids, torch.full((n,), 3))
    (total(images) + total(captions)).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(("name", "settings"), MODELS)
def test_no_images_and_captions_give_gradients_of_zero(name: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = models.create(name, **{**SIZES, **settings})
    found, expected = learning(model, 0), learning(model, 3)
    assert expected.keys() <= found.keys()
    assert all(not gradient.any() for gradient in found.values())


@pytest.mark.parametrize("name", ["scan", "vse_infty", "vsrn"])
def test_scores_of_no_captions_reach_the_weights_of_both_encoders(name: str) -> None:
    torch.manual_seed(0)
    model = models.create(name, **SIZES)
    images, _ = model.encode(torch.randn(3, 4, 12), torch.zeros(3, 6, dtype=torch.int64), torch.full((3,), 3))
    _, captions = model.encode(torch.randn(0, 4, 12), torch.zeros(0, 6, dtype=torch.int64), torch.zeros(0).long())
    scores = model.score(images, captions)
    scores.sum().backward()
    assert scores.shape == (3, 0)
    assert [key for key, weight in model.named_parameters() if weight.grad is None] == []


# Generalised pooling refuses sets without rows.
@pytest.mark.parametrize("lengths", [[3, 0], [0, 0], [0]])
@pytest.mark.parametrize(("name", "settings"), [one for one in MODELS if one[0] not in ("rvsepp", "vse_infty")])
def test_captions_without_words_are_scored_and_trained(name: str, settings: dict[str, Any], lengths: list[int]) -> None:
    torch.manual_seed(0)
    model = models.create(name, **{**SIZES, **settings})
    token_ids = torch.randint(1, 20, (len(lengths), 4))
    images, captions = model.encode(torch.randn(2, 4, 12), token_ids, torch.tensor(lengths))
    scores = model.score(images, captions)
    scores.sum().backward()
    assert scores.shape == (2, len(lengths))
    assert all(weight.grad is not None and bool(weight.grad.isfinite().all()) for weight in model.parameters())
    model.eval()
    embedded = model.encode(torch.randn(2, 4, 12), token_ids, torch.tensor(lengths))
    beside = model.encode_captions(torch.ones(3, 4, dtype=torch.int64), torch.tensor([0, 2, 4]))
    last = model.score(*embedded)[:, -1]
    torch.testing.assert_close(last, model.score(embedded[0], beside)[:, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_similarity_reasoning_takes_no_captions(training: bool) -> None:
    reasoning = SimilarityReasoning(4, 3).train(training)
    images, captions = Fragments.from_padded(torch.randn(2, 5, 4)), Fragments(torch.zeros(0, 4), torch.tensor([0]))
    scores = reasoning((images, torch.randn(2, 4)), (captions, torch.zeros(0, 4)))
    scores.sum().backward()
    assert scores.shape == (2, 0)
    assert all(weight.grad is not None and not weight.grad.any() for weight in reasoning.parameters())
