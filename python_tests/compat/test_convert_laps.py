"""Checkpoints of LAPS's official code give the official scores; others are refused in one line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from itm_fast import cli, compat, models
from itm_fast.data import BertVocabulary
from itm_fast.data.picture_shards import as_patches
from python_tests.compat.official_laps import laps_options, official_scores, random_laps
from python_tests.helpers.bert import PIECES
from python_tests.helpers.conversions import assert_warned, converted, refused
from python_tests.helpers.official_scan import write_checkpoint
from python_tests.helpers.pictures import write_pictures

CAPTIONS = ["red boat", "sun", "dog, boat hat fish", "cup tree"]
# Names of published files, that the vision models of these tests must have, too.
PUBLISHED = {
    "vit": "img_enc.visual_encoder.encoder.layer.0.attention.attention.query.weight",
    "swin": "img_enc.visual_encoder.encoder.layers.0.blocks.0.attention.self.query.weight",
}
SWIN = {"vit_type": "swin", "img_res": 56, "num_patches": 49, "sparse_ratio": 0.8, "aggr_ratio": 0.6}


def vocabulary(folder: Path) -> Path:
    path = folder / "vocab.txt"
    path.write_text("".join(f"{piece}\n" for piece in PIECES))
    return path


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({}, "zip"),
        ({"embed_size": 128, "num_patches": None}, "legacy"),  # The width of the ViT: no layer after it.
        ({"embed_size": 24}, "zip"),  # That of BERT.
        (SWIN, "zip"),
        ({**SWIN, "embed_size": 16}, "zip"),
    ],
)
def test_converted_models_give_the_official_scores(tmp_path: Path, changes: dict[str, Any], form: str) -> None:
    opt = laps_options(**{name: one for name, one in changes.items() if one is not None})
    weights, vision = random_laps(tmp_path / "vision", opt)
    assert PUBLISHED[opt.vit_type] in weights
    given = laps_options(**changes)
    path = write_checkpoint(tmp_path / "model_best.pth", weights, given, form)
    official = compat.convert("laps", path, vocabulary(tmp_path), tmp_path / "run", bert_heads=12)
    assert (official.epoch, official.best_rsum) == (11, 421.25)
    side = opt.img_res
    pictures = np.random.default_rng(1).integers(0, 256, (3, side, side, 3), dtype=np.uint8)
    pictures[1:, : side // 2] //= np.array([[[2]], [[5]]], dtype=np.uint8)[..., None]
    ids = [BertVocabulary(PIECES).encode(caption) for caption in CAPTIONS]
    expected = official_scores(weights, vision, opt, pictures, ids)
    assert expected.std() > 0.05
    found = converted(tmp_path / "run", as_patches(pictures, side // 8).numpy(), CAPTIONS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    model = models.load(tmp_path / "run")
    assert model.config.n_regions == model.similarity.n_regions == opt.num_patches + (opt.vit_type == "vit")


def test_pictures_are_imported_for_a_converted_model(tmp_path: Path) -> None:
    """The commands of the guide."""
    opt = laps_options(**{**SWIN, "img_res": 224, "num_patches": 28 * 28})
    weights, _ = random_laps(tmp_path / "vision", opt)
    path = write_checkpoint(tmp_path / "model_best.pth", weights, opt)
    captions = tmp_path / "captions.csv"
    names = write_pictures(tmp_path / "pictures", 8)
    captions.write_text("image,caption\n" + "".join(f"{name},red boat\n" for name in names))
    for command in (
        ["convert", path, "--source", "laps", "--vocab", vocabulary(tmp_path), "--out", tmp_path / "run"],
        ["data", "import", "--images", tmp_path / "pictures", "--captions", captions, "--size", 224, "--stretch",
         "--out", tmp_path / "store", "--workers", 0, "--min-count", 1],
        ["evaluate", "--checkpoint", tmp_path / "run", "--data", tmp_path / "store", "--json", tmp_path / "found.json"],
    ):  # fmt: skip
        assert cli.run([str(part) for part in command]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["images"] == 1


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"img_res": 64}, {}, "opt.img_res: expected 32 as in the position embeddings, got 64"),
        ({"num_patches": 49}, {}, "opt.num_patches: expected 16 with img_res 32"),
        ({"sparse_ratio": "0.5"}, {}, "opt.sparse_ratio: expected a finite number, got '0.5'"),
        ({"sparse_ratio": 2.0}, {}, "opt.sparse_ratio: expected a number above 0 and at most 1, got 2.0"),
        ({"embed_size": 10}, {},
         "model['img_enc.vision_proj.weight']: expected shape (10, 128) from the options, got (12, 128)"),
        ({"vit_type": "swin"}, {},
         "model['img_enc.visual_encoder.embeddings.cls_token']: this weight is unknown to laps"),
        ({}, {"txt_enc.fc.bias": None}, "model['txt_enc.fc.bias']: this weight is missing"),
        ({}, {"img_enc.visual_encoder.layernorm.weight": None},
         "model['img_enc.visual_encoder.layernorm.weight']: this weight is missing"),
        ({}, {"img_enc.visual_encoder.encoder.layer.1.output.dense.bias": None},
         "model['img_enc.visual_encoder.encoder.layer.1.output.dense.bias']: this weight is missing"),
        ({}, {"img_enc.visual_encoder.embeddings.position_embeddings": torch.zeros(1, 10, 128)},
         "opt.img_res: expected 24 as in the position embeddings, got 32"),
        ({}, {"cross_net.aggr_net.scale": torch.ones(2)},
         "model['cross_net.aggr_net.scale']: expected shape () from the options, got (2,)"),
        ({}, {"cross_net.mlp.weight": torch.ones(2)}, "model['cross_net.mlp.weight']: this weight is unknown to laps"),
        ({}, {"txt_enc.bert.embeddings.word_embeddings.weight": torch.zeros(7, 24)},
         "model['txt_enc.bert.embeddings.word_embeddings.weight']: 7 words, but the vocabulary has 20; pass the "
         "vocabulary that the model was trained with"),
    ],
)  # fmt: skip
def test_checkpoints_that_do_not_fit(
    tmp_path: Path, options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    weights, _ = random_laps(tmp_path / "vision", laps_options())
    held = {name: one for name, one in {**weights, **changes}.items() if one is not None}
    found = refused(tmp_path / "bad", "laps", held, laps_options(**options), vocabulary(tmp_path))
    assert found == message


def test_an_unknown_option_gives_a_warning(tmp_path: Path) -> None:
    weights, _ = random_laps(tmp_path / "vision", laps_options())
    opt = argparse.Namespace(**vars(laps_options()), gumbel=True)
    assert_warned(tmp_path, "laps", weights, opt, vocabulary(tmp_path), "gumbel")
