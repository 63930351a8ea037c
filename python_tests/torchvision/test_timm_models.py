"""Models of timm from local folders in its layout: tokens are those of timm, and they train as image encoders."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.models._hub import save_for_hf

from itm_fast import cli, models
from itm_fast.data.picture_shards import as_patches
from itm_fast.models.base import planned_shapes, shapes_of
from itm_fast.models.vision_folder import load_picture_encoder, read_vision_folder
from python_tests.helpers.pictures import write_captions, write_pictures

SIDE = 32
_VIT = {"img_size": SIDE, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
# For each model: its architecture and arguments, whether it has a class token, all tokens before those of the patches,
# and pixels per token.
MODELS: dict[str, tuple[str, dict[str, Any], bool, int, int]] = {
    "vit": ("vit_tiny_patch16_224", _VIT, True, 1, 8),
    "registers": ("vit_small_patch14_reg4_dinov2", _VIT, True, 5, 8),
    "siglip": ("vit_base_patch16_siglip_224", _VIT, False, 0, 8),
    "swin": ("swin_tiny_patch4_window7_224", {"img_size": SIDE, "window_size": 4, "embed_dim": 8, "depths": [1, 1],
             "num_heads": [2, 2]}, False, 0, 8),
    "convnext": ("convnext_atto", {"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 16]}, False, 0, 32),
    "mobilenet": ("mobilenetv3_small_050", {}, False, 0, 32),
}  # fmt: skip
DATA = {"input_size": (3, SIDE, SIDE), "crop_pct": 0.9, "interpolation": "bicubic", "mean": (0.4, 0.5, 0.6),
        "std": (0.2, 0.3, 0.4)}  # fmt: skip


def write_model(folder: Path, kind: str) -> Any:
    """Write a model with random weights as timm stores it; return the model in evaluation mode."""
    name, arguments = MODELS[kind][:2]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **arguments).eval()
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(part.running_mean, -0.1, 0.1)
    save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    content = json.loads((folder / "config.json").read_text())
    content["pretrained_cfg"] |= DATA
    (folder / "config.json").write_text(json.dumps(content))
    return model


def tokens_of(model: Any, pixels: torch.Tensor, width: int) -> torch.Tensor:
    """Return the tokens (n, t, width), whatever the model's order of dimensions."""
    with torch.no_grad():
        states = model.forward_features(pixels)
    if states.ndim == 4 and states.shape[3] != width:
        states = states.permute(0, 2, 3, 1)
    return states.reshape(len(states), -1, width)


@pytest.mark.parametrize("kind", MODELS)
def test_regions_are_the_tokens_of_timm(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, special = write_model(tmp_path / kind, kind), MODELS[kind][3]
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (54, 72, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    monkeypatch.setattr(socket, "socket", lambda *_arguments, **_options: pytest.fail("the network was used"))
    encoder = load_picture_encoder(tmp_path / kind)
    pixels = torch.from_numpy(encoder.preprocessing.picture(tmp_path / "a.png"))[None]
    with Image.open(tmp_path / "a.png") as image:
        inputs = create_transform(**resolve_data_config(DATA))(image)[None]
    torch.testing.assert_close(encoder.preprocessing.normalized(pixels), inputs, rtol=0, atol=1e-6)
    expected = tokens_of(model, inputs, encoder.width)[:, special:]
    assert expected.std() > 1e-3
    torch.testing.assert_close(encoder(pixels), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", [32, 64])
@pytest.mark.parametrize("kind", MODELS)
def test_embeddings_are_those_of_timm(tmp_path: Path, kind: str, side: int) -> None:
    """In float64, at the size of the model and at a larger one; all weights that are kept learn."""
    write_model(tmp_path / kind, kind)
    name, arguments, has_class, special, step = MODELS[kind]
    folder = read_vision_folder(tmp_path / kind)
    more = {"dynamic_img_size": True} if "img_size" in arguments else {}
    whole = timm.create_model(name, num_classes=3, **arguments, **more).double().eval()
    whole.load_state_dict(timm.models.load_state_dict(str(tmp_path / kind / "model.safetensors")))
    random = np.random.default_rng(0).integers(0, 256, (2, side, side, 3), dtype=np.uint8)
    colours = torch.tensor([folder.preprocessing.mean, folder.preprocessing.std], dtype=torch.float64)
    pixels = ((torch.from_numpy(random).double() / 255 - colours[0]) / colours[1]).permute(0, 3, 1, 2)
    settings = json.loads(json.dumps(folder.settings()))
    options = {"vocab_size": 9, "feature_dim": 16 * 16 * 3, "embed_dim": 12, "image_encoder": "backbone",
               "image_backbone": settings, "image_class_token": has_class}  # fmt: skip
    model = models.create("scan", **options)
    assert planned_shapes("scan", options) == shapes_of(model)
    folder.copy_weights(model.image_encoder.backbone)
    encoder = model.double().eval().image_encoder
    states = tokens_of(whole, pixels, encoder.width)
    kept = [0] * has_class + list(range(special, states.shape[1]))
    assert len(kept) == encoder.regions(side) == (side // step) ** 2 + has_class
    rows = states[:, kept] @ encoder.fc.weight.T + encoder.fc.bias
    found = model.encode_images(as_patches(random, side // 16).double())
    expected = (rows / rows.norm(dim=2, keepdim=True)).flatten(0, 1)
    torch.testing.assert_close(found.values, expected, rtol=1e-5, atol=1e-5)  # Stored patches are float32.
    # Batch normalisation keeps its statistics: in training, a picture's tokens do not depend on the batch.
    alone = model.train().encode_images(as_patches(random[:1], side // 16).double())
    both = model.encode_images(as_patches(random, side // 16).double())
    if kind != "mobilenet":
        torch.testing.assert_close(both.values[: len(kept)], alone.values, rtol=1e-9, atol=1e-9)
    both.values.square().sum(1).add(both.values.sum(1)).sum().backward()
    assert [one for one, weight in encoder.named_parameters() if weight.grad is None] == []


def test_a_run_from_a_folder_of_timm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Import, train with checkpointing and micro-batches, and evaluate without the folder."""
    write_model(tmp_path / "vit", "vit")
    captions = write_captions(tmp_path / "captions.csv", write_pictures(tmp_path / "pictures", 20))
    commands = [
        ["data", "import", "--images", "pictures", "--captions", captions, "--out", "store", "--size", 32, "--grid", 2,
         "--workers", 0, "--min-count", 1],
        ["train", "--data", "store", "--image-backbone", "vit", "--image-checkpointing", "--image-class-token",
         "--epochs", 1, "--batch-size", 8, "--micro-batch", 3, "--out", "run"],
        ["evaluate", "--checkpoint", "run", "--data", "store", "--split", "test"],
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        for number, command in enumerate(commands):
            if number == 2:
                (tmp_path / "vit" / "config.json").unlink()
            assert cli.run([str(one) for one in command]) == 0
    assert "rsum" in capsys.readouterr().out


def test_settings_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    write_model(tmp_path / "vit", "vit")
    path = tmp_path / "vit" / "config.json"
    content = json.loads(path.read_text())
    for changes, message in (
        ({"architecture": "hf-hub:timm/vit"}, "architecture: expected a model of timm "),
        ({"architecture": "vit_huge_of_nobody"}, "architecture: expected a model of timm "),
        ({"model_args": {"checkpoint_path": "weights.bin"}}, "model_args: 'checkpoint_path' is not supported"),
        ({"model_args": {"pretrained": True}}, "model_args: 'pretrained' is not supported"),
        ({"model_args": {"colour": 3}}, "the settings are not those of a vit_tiny_patch16_224 model ("),
    ):
        path.write_text(json.dumps({**content, **changes}))
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - The message is checked below.
            read_vision_folder(tmp_path / "vit")
        assert str(raised.value).startswith(f"{path}: {message}")
    path.write_text(json.dumps({**content, "model_args": {**content["model_args"], "depth": 3}}))
    with pytest.raises(ValueError, match=rf"^{tmp_path}/vit/model.safetensors: the weight blocks.2.\S+ is missing$"):
        read_vision_folder(tmp_path / "vit")
