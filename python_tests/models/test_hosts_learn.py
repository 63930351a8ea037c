"""Hosts and other training methods learn the bundled pictures within a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from itm_fast import evaluation, models
from itm_fast.data import CaptionDataset, PrecomputedDataset, Vocabulary, emoji
from itm_fast.training import TrainConfig
from itm_fast.training.metrics_log import read_metrics
from itm_fast.training.step import Stepper
from python_tests.helpers.runs import config, run

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


# Settings of each method that other papers train with.
METHODS: dict[str, dict[str, Any]] = {
    "aoq": {"scenario": "aoq", "offline_candidates": 20},
    "meta_spn": {"scenario": "meta_spn"},
    "ncr": {"scenario": "ncr", "noise": 0.2},
    "sam": {"scenario": "sam"},
    "mpl": {"loss": "polynomial"},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_training_method_learns_the_bundled_pictures(tmp_path: Path, name: str) -> None:
    """After a warm-up of all negatives, and still after as many epochs of the method."""
    pictures, captions = emoji.patches(emoji.pictures("dev")[:PICTURES]), emoji.captions("dev")[: 5 * PICTURES]
    for split in ("train", "dev"):
        np.save(tmp_path / f"{split}_ims.npy", pictures)
        (tmp_path / f"{split}_caps.txt").write_text("".join(f"{caption}\n" for caption in captions))
    emoji.vocabulary().save(tmp_path / "vocab.json")
    options = {"image_encoder": "patches", "embed_dim": 16, "word_dim": 16}
    settings = {"epochs": 12, "warmup_epochs": 6, "batch_size": 30, "lr": 5e-3, "model_options": options}
    best = run(config(tmp_path, tmp_path / "run", model="vsepp", **settings, **METHODS[name])).best
    log = read_metrics(tmp_path / "run" / "metrics.jsonl")
    last = [line["rsum"] for line in log if line["kind"] == "validation"][-1]
    assert last > 340
    learned = models.load(tmp_path / "run")
    dev = PrecomputedDataset(tmp_path, "dev", learned.tokenizer)
    assert evaluation.evaluate(learned, dev)["rsum"] == pytest.approx(best["rsum"])
