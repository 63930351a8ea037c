"""Vision models from local folders: regions are the hidden states of transformers, and damaged folders are one line."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from itm_fast.models.vision_folder import load_picture_encoder
from python_tests.helpers.pictures import ENCODERS, SIDE, write_encoder

# The tokens before those of the patches.
SPECIAL = {"vit": 1, "deit": 2, "swin": 0, "dinov2": 1, "dinov2_with_registers": 4, "clip": 1, "siglip": 0}


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    return tmp_path / "a.png"


@pytest.mark.parametrize("kind", ENCODERS)
def test_regions_are_the_patch_tokens_of_transformers(
    tmp_path: Path, picture: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_encoder(tmp_path / kind, kind)
    tower = getattr(model, "vision_model", getattr(model, "vit", model))
    with Image.open(picture) as image:
        inputs = ENCODERS[kind][1]()(images=image.convert("RGB"), return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        states = tower(pixel_values=inputs, output_hidden_states=True)
    # Whatever tries to reach the network fails.
    monkeypatch.setattr(socket, "socket", lambda *_arguments, **_options: pytest.fail("the network was used"))
    encoder = load_picture_encoder(tmp_path / kind)
    pixels = torch.from_numpy(encoder.preprocessing.picture(picture))[None]
    torch.testing.assert_close(encoder.preprocessing.normalized(pixels), inputs, rtol=0, atol=1e-6)
    last = states.last_hidden_state[:, SPECIAL[kind] :]
    torch.testing.assert_close(encoder(pixels), last, rtol=1e-4, atol=1e-5)
    assert (encoder.regions, encoder.width) == tuple(last.shape[1:])
    first = load_picture_encoder(tmp_path / kind, layer=0)(pixels)
    torch.testing.assert_close(first, states.hidden_states[0][:, SPECIAL[kind] :], rtol=1e-4, atol=1e-5)


def test_pools(tmp_path: Path) -> None:
    write_encoder(tmp_path / "vit")
    pixels = torch.randint(0, 256, (2, SIDE, SIDE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    encoders = {pool: load_picture_encoder(tmp_path / "vit", pool=pool) for pool in ("patches", "class", "mean", "2x2")}
    found = {pool: encoder(pixels) for pool, encoder in encoders.items()}
    grid = found["patches"].view(2, 4, 4, 16)
    torch.testing.assert_close(found["mean"][:, 0], grid.mean((1, 2)))
    torch.testing.assert_close(found["2x2"][:, 1], grid[:, :2, 2:].mean((1, 2)))
    assert found["class"].shape == (2, 1, 16)
    assert not torch.isclose(found["class"], found["patches"]).all(2).any()
    assert len({encoder.digest for encoder in encoders.values()}) == 4


def refused(folder: Path, **options: object) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - The callers check the message.
        load_picture_encoder(folder, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def change(path: Path, **values: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in {**content, **values}.items() if value is not ...}))


BAD_SETTINGS = {
    "config.json": [
        ({"model_type": "bert"}, "model_type: expected vit, deit, swin"),
        ({"quantization_config": {}}, "quantization_config: quantised weights are not supported"),
    ],
    "preprocessor_config.json": [
        ({"do_resize": False}, "do_resize: expected true, got False"),
        ({"size": {"height": 32, "width": 16}}, "size: expected equal height and width"),
        ({"size": "32"}, "size: expected 1 to 4096 pixels per side, got '32'"),
        ({"do_center_crop": True, "crop_size": 64, "size": 32}, "crop_size: expected at most the shortest edge, 32"),
        ({"resample": None}, "resample: expected the number of a filter of Pillow, 0 to 5, got None"),
        ({"resample": 9}, "resample: expected the number of a filter of Pillow, 0 to 5, got 9"),
        ({"image_mean": [0.5]}, "image_mean: expected three numbers, got [0.5]"),
        ({"image_std": [0, 0, 0]}, "rescale_factor, image_std: expected positive numbers"),
    ],
}


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [(file, values, message) for file, cases in BAD_SETTINGS.items() for values, message in cases],
)
def test_settings_that_do_not_fit_are_one_line(
    tmp_path: Path, file: str, values: dict[str, object], message: str
) -> None:
    write_encoder(tmp_path / "vit")
    change(tmp_path / "vit" / file, **values)
    assert refused(tmp_path / "vit").startswith(f"{tmp_path}/vit/{file}: {message}")


def test_settings_of_a_whole_processor_are_read(tmp_path: Path) -> None:
    """They count more than those of an image processor alone, as in transformers."""
    write_encoder(tmp_path / "clip", "clip")
    expected = load_picture_encoder(tmp_path / "clip").preprocessing
    own, whole = (tmp_path / "clip" / name for name in ("preprocessor_config.json", "processor_config.json"))
    settings = json.loads(own.read_text())
    whole.write_text(json.dumps({"processor_class": "CLIPProcessor", "image_processor": None}))
    assert load_picture_encoder(tmp_path / "clip").preprocessing == expected
    whole.write_text(json.dumps({"processor_class": "CLIPProcessor", "image_processor": settings}))
    change(own, image_mean=[0.5, 0.5, 0.5])
    assert load_picture_encoder(tmp_path / "clip").preprocessing == expected
    own.unlink()
    assert load_picture_encoder(tmp_path / "clip").preprocessing == expected
    change(whole, image_processor={**settings, "resample": 9})
    assert refused(tmp_path / "clip").startswith(f"{whole}: resample: expected the number of a filter of Pillow")
    change(whole, image_processor=3)
    assert refused(tmp_path / "clip") == f"{whole}: image_processor: expected a JSON object, got 3"
    whole.write_text("[]")
    assert refused(tmp_path / "clip") == f"{whole}: expected a JSON object, got []"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "no such file; expected the folder of a vision model"),
        ("preprocessor_config.json", "no such file; it says how pictures are scaled and normalised"),
        ("model.safetensors", "no such file; expected weights as safetensors"),
    ],
)
def test_missing_files_are_one_line(tmp_path: Path, file: str, message: str) -> None:
    write_encoder(tmp_path / "vit")
    (tmp_path / "vit" / file).unlink()
    assert refused(tmp_path / "vit").startswith(f"{tmp_path}/vit/{file}: {message}")


def test_missing_weights_are_one_line(tmp_path: Path) -> None:
    write_encoder(tmp_path / "vit")
    path = tmp_path / "vit" / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if name.endswith("layernorm.weight"))
    save_file({other: value for other, value in weights.items() if other != name}, path, metadata={"format": "pt"})
    assert re.fullmatch(
        rf"{path}: the weight \S*layernorm.weight is missing \(1 weights in all\)", refused(path.parent)
    )


def test_weights_of_another_size_are_one_line(tmp_path: Path) -> None:
    write_encoder(tmp_path / "vit")
    change(tmp_path / "vit" / "config.json", hidden_size=24)
    message = rf"{tmp_path}/vit/model.safetensors: (vit\.)?embeddings\.cls_token: expected shape \(1, 1, 24\), got "
    assert re.match(message + r"\(1, 1, 16\) \(\d\d such weights in all\)$", refused(tmp_path / "vit"))
    change(tmp_path / "vit" / "config.json", hidden_size="wide")
    assert refused(tmp_path / "vit").startswith(
        f"{tmp_path}/vit: config.json and weights are not those of a vit model ("
    )


def test_pictures_of_a_size_that_the_model_does_not_take_are_one_line(tmp_path: Path) -> None:
    write_encoder(tmp_path / "vit")
    change(tmp_path / "vit" / "preprocessor_config.json", size={"height": 64, "width": 64})
    assert refused(tmp_path / "vit").startswith(
        f"{tmp_path}/vit: pictures of 64 pixels, which its image processor makes, do not fit the model ("
    )


def test_code_and_adapters_in_the_folder_are_not_used(tmp_path: Path) -> None:
    write_encoder(tmp_path / "vit")
    change(tmp_path / "vit" / "config.json", auto_map={"AutoModel": "evil.Model"}, _name_or_path="some/repository")
    (tmp_path / "vit" / "evil.py").write_text("raise SystemExit('executed')")
    assert load_picture_encoder(tmp_path / "vit").regions == 16
    (tmp_path / "vit" / "adapter_config.json").write_text("{}")
    assert "adapter_config.json: adapters are not supported" in refused(tmp_path / "vit")


def test_options_that_do_not_fit_the_model_are_one_line(tmp_path: Path) -> None:
    write_encoder(tmp_path / "swin", "swin")
    assert refused(tmp_path / "swin", pool="class").startswith("pool: this model has no class token")
    assert refused(tmp_path / "swin", pool="9x9").startswith("pool: expected at most 4x4, the patches of the model")
    assert refused(tmp_path / "swin", pool="most").startswith("pool: expected patches, class, mean, or a grid")
    assert refused(tmp_path / "swin", layer=7) == "layer: expected -3 to 2, got 7"
    assert refused(tmp_path / "none").startswith(f"{tmp_path}/none: no such folder; expected a local folder")


def test_without_transformers_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_encoder(tmp_path / "vit")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refused(tmp_path / "vit").endswith("install it with pip install 'itm_fast[vision]'")


def test_weights_in_bfloat16_compute_in_float32(tmp_path: Path) -> None:
    write_encoder(tmp_path / "vit").to(torch.bfloat16).save_pretrained(tmp_path / "vit")
    encoder = load_picture_encoder(tmp_path / "vit")
    found = encoder(torch.arange(SIDE * SIDE * 3).remainder(256).to(torch.uint8).view(1, SIDE, SIDE, 3))
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())
