"""Official checkpoints of OSCAR's retrieval give the official scores; other files are refused without running code."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from itm_fast import compat, models
from itm_fast.data import BertVocabulary
from python_tests.compat.test_convert_errors import Attack
from python_tests.helpers.bert import PIECES
from python_tests.helpers.commands import error
from python_tests.helpers.conversions import converted
from python_tests.helpers.official_oscar import official_score, random_oscar
from python_tests.helpers.official_scan import options, random_model, write_checkpoint

WIDTH = 9
CAPTIONS = ["red boat", "sun", "dog, boat hat fish", "cup tree"]
CONFIG = {"num_attention_heads": 12, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "img_feature_dim": WIDTH}


def write(folder: Path, weights: object, config: object = None, *, new: bool = True) -> Path:
    """Write the folder as the official code saves it."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    return folder


def convert(folder: Path, out: Path, **more: Any) -> None:
    compat.convert("oscar", folder / "pytorch_model.bin", folder / "vocab.txt", out, **more)


@pytest.mark.parametrize(
    ("norm", "config", "given", "heads", "new"),
    [(False, CONFIG, {}, 12, True), (True, None, {}, 1, False), (False, None, {"bert_heads": 6}, 6, True),
     (False, CONFIG, {"bert_heads": 6}, 6, False)],
)  # fmt: skip
def test_converted_models_give_the_official_scores(
    tmp_path: Path, norm: bool, config: object, given: dict[str, int], heads: int, new: bool
) -> None:
    weights = random_oscar(WIDTH, norm=norm)
    torch.save(argparse.Namespace(add_od_labels=False), tmp_path / "training_args.bin")
    held = {**weights, "bert.embeddings.position_ids": torch.arange(16)[None]}
    folder = write(tmp_path / "official", held, config, new=new)
    (tmp_path / "training_args.bin").rename(folder / "training_args.bin")
    convert(folder, tmp_path / "run", **given)
    features = np.random.default_rng(1).standard_normal((3, 5, WIDTH)).astype(np.float32)
    pieces = [BertVocabulary(PIECES).encode(caption) for caption in CAPTIONS]
    expected = np.array([[official_score(weights, one, ids, heads=heads) for ids in pieces] for one in features])
    assert expected.std() > 0.1
    found = converted(tmp_path / "run", features, CAPTIONS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))
    assert models.load(tmp_path / "run").config.bert_heads == heads


def test_tags_are_read_as_in_the_training(tmp_path: Path) -> None:
    folder = write(tmp_path / "official", random_oscar(WIDTH))
    device = torch.device("cpu")
    for number, (args, expected) in enumerate(
        ((None, True), ({"add_od_labels": True}, True), ({"add_od_labels": False}, False), ({}, False))
    ):
        if args is not None:
            torch.save(argparse.Namespace(device=device, **args), folder / "training_args.bin")
        convert(folder, tmp_path / str(number))
        assert models.load(tmp_path / str(number)).reads_tags is expected
    torch.save(Attack(tmp_path / "was-run"), folder / "training_args.bin")
    with pytest.raises(ValueError, match=r"/training_args\.bin: not a readable checkpoint: names the Python object"):
        convert(folder, tmp_path / "refused")
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classifier.weight": None}, "state_dict['classifier.weight']: this weight is missing"),
        ({"bert.img_embedding.weight": None}, "state_dict['bert.img_embedding.weight']: this weight is missing"),
        ({"classifier.weight": torch.zeros(1, 24)},
         "state_dict['classifier.weight']: expected shape (2, 24) from the options, got (1, 24)"),
        ({"classifier.0.weight": torch.zeros(48, 24)},
         "state_dict['classifier.0.weight']: this weight is unknown to oscar"),
        ({"classifier.bias": torch.full((2,), torch.nan)},
         "state_dict['classifier.bias']: row 0 holds values that are not finite"),
        ({"classifier.bias": "text"}, "state_dict['classifier.bias']: expected a tensor, got str"),
        ({"bert.embeddings.word_embeddings.weight": torch.zeros(7, 24)},
         "state_dict['bert.embeddings.word_embeddings.weight']: 7 words, but the vocabulary has 20; pass the "
         "vocabulary that the model was trained with"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    weights = {name: one for name, one in {**random_oscar(WIDTH), **changes}.items() if one is not None}
    folder = write(tmp_path / "official", weights)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as refused:
        convert(folder, tmp_path / "run")
    assert str(refused.value) == f"{folder}/pytorch_model.bin: {message}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**CONFIG, "hidden_act": "relu"}, "hidden_act: expected gelu, got 'relu'"),
        ({**CONFIG, "img_layer_norm_eps": 1e-5}, "img_layer_norm_eps: expected 1e-12, got 1e-05"),
        ({**CONFIG, "num_attention_heads": 0}, "num_attention_heads: expected a number at least 1, got 0"),
        ([], "expected a JSON object, got []"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, config: object, message: str) -> None:
    folder = write(tmp_path / "official", random_oscar(WIDTH), config)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as refused:
        convert(folder, tmp_path / "run")
    assert str(refused.value) == f"{folder}/config.json: {message}"


def test_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A foreign pickle, a checkpoint of SCAN, and a folder: one line each, from the command line."""
    mark = tmp_path / "was-run"
    folder = write(tmp_path / "official", {**random_oscar(WIDTH), "classifier.bias": Attack(mark)})
    name = folder / "pytorch_model.bin"
    scan = write_checkpoint(tmp_path / "scan.pth.tar", random_model(options()), options())
    for path, message in (
        (name, f"not a readable checkpoint: names the Python object {os.mkdir.__module__}.mkdir, which is not "
         "allowed; no code was run"),
        (scan, "not a readable checkpoint: names the Python object argparse.Namespace, which is not allowed; no code "
         "was run"),
        (folder, "expected a checkpoint file, found a folder"),
        (tmp_path / "nowhere.bin", "no such checkpoint file"),
    ):  # fmt: skip
        command = ["convert", path, "--source", "oscar", "--vocab", folder / "vocab.txt", "--out", tmp_path / "run"]
        assert error(capsys, *command) == (1, f"{path}: {message}")
    assert not mark.exists()
    assert not (tmp_path / "run").exists()
    torch.save(list(random_oscar(WIDTH).values()), name)
    command = ["convert", name, "--source", "oscar", "--vocab", folder / "vocab.txt", "--out", tmp_path / "run"]
    assert error(capsys, *command) == (1, f"{name}: state_dict: expected a state dict, got list")
