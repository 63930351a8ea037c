"""Folders in timm's layout, with a stand-in for timm; python_tests/torchvision compares with its own models."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from itm_fast import models
from itm_fast.data.picture_shards import as_patches
from itm_fast.models.base import planned_shapes, shapes_of
from itm_fast.models.vision_folder import load_picture_encoder, read_vision_folder
from itm_fast.nn.timm_backbone import TimmModel, TokenLayout
from python_tests.models.timm_stand_in import SIDE, timm_stand_in, write_model


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", timm_stand_in())


def refused(folder: Path, **options: object) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - The callers check the message.
        load_picture_encoder(folder, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("vit", TokenLayout(4, 2, True, 8)),
        ("convolutions", TokenLayout(8, 0, False, 6)),
        ("windows", TokenLayout(8, 0, False, 6)),
    ],
)
def test_tokens_are_those_of_the_model(tmp_path: Path, name: str, layout: TokenLayout) -> None:
    """Also for larger pictures, and without the parts behind the tokens; a rebuilt model has the same weights."""
    whole = write_model(tmp_path / name, name)
    folder = read_vision_folder(tmp_path / name)
    assert folder.model.layout == layout
    names = {one.split(".")[0] for one in shapes_of(folder.model.model)}
    assert not names & {"fc_norm", "head"}
    assert not any(weight.grad is not None for weight in folder.model.parameters())
    settings = json.loads(json.dumps(folder.settings()))
    options = {"vocab_size": 9, "feature_dim": 192, "embed_dim": 5, "image_encoder": "backbone",
               "image_backbone": settings, "image_class_token": layout.class_token}  # fmt: skip
    model = models.create("scan", **options)
    assert planned_shapes("scan", options) == shapes_of(model)
    encoder = model.image_encoder
    folder.copy_weights(encoder.backbone)
    whole.strict = False
    for side in (SIDE, 2 * SIDE):
        random = np.random.default_rng(0).integers(0, 256, (2, side, side, 3), dtype=np.uint8)
        pixels = (torch.from_numpy(random) / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.5, 0.4, 0.3])
        states = whole.forward_features(pixels.permute(0, 3, 1, 2))
        if name == "convolutions":
            states = states.permute(0, 2, 3, 1)
        states = states.flatten(1, -2)
        if name == "vit":
            states = torch.cat([states[:, :1], states[:, 2:]], 1)
        found = encoder.train().states(as_patches(random, side // 8))
        torch.testing.assert_close(found.values, states.flatten(0, 1), rtol=1e-4, atol=1e-5)
        assert len(found.values) == 2 * encoder.regions(side)


def test_pictures_are_scaled_as_timm_scales_them(tmp_path: Path) -> None:
    """The shorter edge becomes 16 / 0.9 pixels; a crop at half a pixel is rounded to even."""
    write_model(tmp_path / "vit")
    pixels = np.random.default_rng(0).integers(0, 256, (34, 59, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = load_picture_encoder(tmp_path / "vit").preprocessing.picture(tmp_path / "a.png")
    scaled = np.asarray(Image.fromarray(pixels).resize((29, 17), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(found, scaled[:16, 6:22])
    change(tmp_path / "vit" / "config.json", pretrained_cfg={"input_size": [3, 16, 16], "crop_mode": "squash"})
    found = load_picture_encoder(tmp_path / "vit").preprocessing.picture(tmp_path / "a.png")
    squashed = np.asarray(Image.fromarray(pixels).resize((18, 18), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(found, squashed[1:17, 1:17])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"architecture": "hf-hub:a/vit"},
            "architecture: expected a model of timm 0, got 'hf-hub:a/vit'",
        ),
        ({"model_args": [1]}, "model_args: expected names and values, got [1]"),
        ({"model_args": {"checkpoint_path": "a"}}, "model_args: 'checkpoint_path' is not supported"),
        ({"model_args": {"in_chans": 1}}, "model_args: in_chans: expected 3, got 1"),
        ({"model_args": {"depth": {"a": 1}}}, "model_args: 'depth': expected plain values"),
        ({"model_args": {"depth": 10**9}}, "model_args: 'depth': expected at most 65536, got 1000000000"),
        ({"model_args": {"colour": 1}}, "the settings are not those of a vit model ("),
        ({"pretrained_cfg": 3}, "pretrained_cfg: expected a JSON object, got 3"),
        ({"pretrained_cfg": {"input_size": [3, 16, 24]}}, "input_size: expected three colours and equal height"),
        ({"pretrained_cfg": {"input_size": [3, 18, 18]}}, "vit: expected a square grid of tokens"),
        ({"pretrained_cfg": {"interpolation": "random"}}, "interpolation: expected one of bicubic, bilinear"),
        ({"pretrained_cfg": {"crop_mode": "border"}}, "crop_mode: expected center or squash, got 'border'"),
        ({"pretrained_cfg": {"crop_pct": 0}}, "crop_pct: expected a number above 0 and up to 1, got 0"),
        ({"pretrained_cfg": {"mean": [1]}}, "mean: expected three numbers, got [1]"),
        ({"pretrained_cfg": {"std": [1, 1, 0]}}, "std: expected positive numbers, got [1, 1, 0]"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(tmp_path: Path, values: dict[str, object], message: str) -> None:
    write_model(tmp_path / "vit")
    change(tmp_path / "vit" / "config.json", **values)
    found = refused(tmp_path / "vit")
    assert found.startswith(f"{tmp_path}/vit/config.json: ")
    assert message in found


def test_weights_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    write_model(tmp_path / "vit")
    path = tmp_path / "vit" / "model.safetensors"
    weights = load_file(path)
    save_file({f"timm_model.{name}": value for name, value in weights.items()}, path)
    assert read_vision_folder(tmp_path / "vit").kind == "timm", "as transformers saves it"
    save_file({**weights, "cls_token": torch.full((1, 1, 8), torch.nan)}, path)
    assert re.match(rf"{path}: cls_token: .*not finite", refused(tmp_path / "vit"))
    save_file({**weights, "cls_token": torch.ones(1, 1, 9)}, path)
    assert refused(tmp_path / "vit") == f"{path}: cls_token: expected shape (1, 1, 8), got (1, 1, 9)"
    save_file({name: value for name, value in weights.items() if name != "cls_token"}, path)
    assert refused(tmp_path / "vit") == f"{path}: the weight cls_token is missing"


def test_what_models_of_timm_cannot_do_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "vit")
    assert (
        refused(tmp_path / "vit", layer=1)
        == "layer: expected -1, as only the last layer of a model of timm can be read"
    )
    model = TimmModel({"architecture": "vit", "image_size": SIDE})
    model.gradient_checkpointing_enable({})
    assert model.model.checkpointing
    other = TimmModel({"architecture": "windows", "image_size": SIDE})
    with pytest.raises(ValueError, match=r"^image_checkpointing: a windows model of timm does not support it$"):
        other.gradient_checkpointing_enable({})
    monkeypatch.setitem(sys.modules, "timm", None)
    assert refused(tmp_path / "vit").endswith("install it with pip install 'itm_fast[timm]'")
