"""A small index of bundled emoji with their captions, and a model with random weights.

Inside: `PICTURES`, `emoji_model`, `emoji_dataset`, `write_emoji_index`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from itm_fast import models
from itm_fast.data import CaptionDataset, emoji
from itm_fast.search import Index

PICTURES = 12


def emoji_model(seed: int = 0) -> models.MatchingModel:
    """Make SCAN over the patches of emoji."""
    torch.manual_seed(seed)
    words = emoji.vocabulary()
    sizes = {"vocab_size": len(words), "feature_dim": 432, "embed_dim": 16, "word_dim": 8}
    model = models.create("scan", **sizes, image_encoder="patches").eval()
    model.tokenizer = words
    return model


def emoji_dataset(count: int = PICTURES) -> CaptionDataset:
    """Return the first test pictures, named "set/{n}.png", with their five captions each."""
    features = emoji.patches(emoji.pictures("test")[:count])
    captions = emoji.captions("test")[: 5 * count]
    names = [f"set/{number}.png" for number in range(count)]
    return CaptionDataset(features, captions, np.arange(5 * count) // 5, emoji.vocabulary(), image_ids=names)


def write_emoji_index(folder: Path, seed: int = 0) -> Path:
    """Write the model to `folder/run` and its index to `folder/index`; return the index."""
    emoji_model(seed).save(folder / "run")
    Index.build(folder / "run", emoji_dataset(), folder / "index", pooling="mean", overwrite=True)
    return folder / "index"
