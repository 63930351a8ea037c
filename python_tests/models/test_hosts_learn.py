"""Hosts learn the bundled pictures within a few steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from itm_fast import evaluation, models
from itm_fast.data import CaptionDataset, PrecomputedDataset, Vocabulary, emoji
from itm_fast.training import TrainConfig
from itm_fast.training.step import Stepper

PICTURES = 12  # of five captions each
# Settings of each model.
MODELS: dict[str, dict[str, Any]] = {
    "saem": {"attention_hidden_dim": 32, "phrase_channels": 32},
    "camp": {},
    "esa": {},
    "naaf": {"threshold_words": 20},
    "pfan": {"image_encoder": "linear", "position_dim": 8},
    "chan": {"region_attention": True, "aggregation": "mean"},
    "vsrn": {"graph_layers": 1, "caption_weight": 0.1, "caption_hidden_dim": 16},
}


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    return emoji.vocabulary()


@pytest.fixture(scope="module")
def pictures(words: Vocabulary) -> PrecomputedDataset:
    return emoji.load("dev", words)


def with_boxes(pictures: PrecomputedDataset) -> CaptionDataset:
    """Return the pictures with the boxes of their patches."""
    edges = np.arange(emoji.GRID) / emoji.GRID
    tops, lefts = (one.ravel() for one in np.meshgrid(edges, edges, indexing="ij"))
    boxes = np.stack([lefts, tops, lefts + 1 / emoji.GRID, tops + 1 / emoji.GRID], axis=1).clip(0, 1)
    features = np.asarray(pictures.features)
    repeated = np.tile(boxes, (len(features), 1)).astype(np.float32)
    located = CaptionDataset(features, pictures.captions, pictures.caption_image, pictures.vocabulary, boxes=repeated)
    located.read_boxes()
    return located


@pytest.mark.parametrize("name", MODELS)
def test_a_host_learns_the_bundled_pictures(words: Vocabulary, pictures: PrecomputedDataset, name: str) -> None:
    """The sum of recalls rises well above that of chance, about 230 of 600 for these pictures."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(words), "feature_dim": pictures.features.shape[2], "embed_dim": 16, "word_dim": 16}
    model = models.create(name, **{**sizes, "image_encoder": "patches", **MODELS[name]})
    if model.reads_boxes:
        pictures = with_boxes(pictures)
    train = TrainConfig(data="", out="", model=name, lr=5e-3, mining="all")
    stepper = Stepper(train, model, words, torch.device("cpu"), 40)
    random = torch.Generator().manual_seed(0)
    for number in range(40):
        captions = 5 * torch.arange(PICTURES) + torch.randint(5, (PICTURES,), generator=random)
        stepper(pictures.batch(captions), "all", number)
    learned = evaluation.evaluate(model, pictures, first_images=PICTURES)["rsum"]
    assert learned > 340
