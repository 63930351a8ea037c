"""A vision model as image encoder: embeddings equal those of transformers, and settings rebuild it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from itm_fast import models
from itm_fast.data.picture_shards import as_patches
from itm_fast.models.base import planned_shapes, shapes_of
from itm_fast.models.vision_folder import read_vision_folder
from python_tests.helpers.pictures import ENCODERS, write_encoder

SPECIAL = {"vit": 1, "deit": 2, "swin": 0, "dinov2": 1, "dinov2_with_registers": 4, "clip": 1, "siglip": 0}


@pytest.mark.parametrize("side", [32, 48])
@pytest.mark.parametrize("kind", ENCODERS)
def test_embeddings_are_those_of_transformers(tmp_path: Path, kind: str, side: int) -> None:
    """In float64, at the size of the model and at a larger one, from stored patches of another size."""
    whole = write_encoder(tmp_path / kind, kind)
    tower = getattr(whole, "vision_model", getattr(whole, "vit", whole)).double()
    folder = read_vision_folder(tmp_path / kind)
    settings = json.loads(json.dumps(folder.settings()))
    colours = torch.tensor([folder.preprocessing.mean, folder.preprocessing.std], dtype=torch.float64)
    random = np.random.default_rng(0).integers(0, 256, (2, side, side, 3), dtype=np.uint8)
    pixels = (torch.from_numpy(random).double() / 255 - colours[0]) / colours[1]
    more = {} if kind.startswith("dinov2") else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        states = tower(pixel_values=pixels.permute(0, 3, 1, 2), **more).last_hidden_state
    for class_token in (False, True):
        options = {"vocab_size": 9, "feature_dim": 16 * 16 * 3, "embed_dim": 12, "image_encoder": "backbone",
                   "image_backbone": settings, "image_class_token": class_token}  # fmt: skip
        if class_token and not SPECIAL[kind]:
            with pytest.raises(ValueError, match=r"^image_class_token: a "):
                models.create("scan", **options)
            continue
        model = models.create("scan", **options)
        assert planned_shapes("scan", options) == shapes_of(model)
        folder.copy_weights(model.image_encoder.backbone)
        encoder = model.double().eval().image_encoder
        kept = [0] * class_token + list(range(SPECIAL[kind], states.shape[1]))
        assert len(kept) == encoder.regions(side)
        rows = states[:, kept] @ encoder.fc.weight.T + encoder.fc.bias
        found = model.encode_images(as_patches(random, side // 16).double())
        expected = (rows / rows.norm(dim=2, keepdim=True)).flatten(0, 1)
        torch.testing.assert_close(found.values, expected, rtol=1e-6, atol=1e-6)  # Stored patches are float32.
        assert found.offsets.tolist() == [0, len(kept), 2 * len(kept)]
        model.train()(
            as_patches(random, side // 16).double(), torch.ones(2, 3).long(), torch.tensor([3, 3])
        ).sum().backward()
        assert [name for name, weight in encoder.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize("kind", ENCODERS)
def test_weights_have_the_names_of_published_files(tmp_path: Path, kind: str) -> None:
    """So every version of transformers reads them. `save_pretrained` writes the published names."""
    write_encoder(tmp_path / kind, kind)
    with safe_open(tmp_path / kind / "model.safetensors", "pt") as file:
        published = {name.removeprefix("vision_model.").removeprefix("vit.") for name in file.keys()}  # noqa: SIM118
    folder = read_vision_folder(tmp_path / kind)
    options = {"vocab_size": 9, "feature_dim": 192, "image_encoder": "backbone", "image_backbone": folder.settings()}
    model = models.create("scan", **options)
    folder.copy_weights(model.image_encoder.backbone)
    start = "image_encoder.backbone."
    own = {name.removeprefix(start) for name in model.state_dict() if name.startswith(start)}
    assert own <= published
    assert len(own) >= 26
    again = models.create("scan", **options)
    again.load_state_dict(model.state_dict())
    found = again.image_encoder.backbone.state_dict()
    assert all(torch.equal(found[name], one) for name, one in model.image_encoder.backbone.state_dict().items())


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    write_encoder(tmp_path / "vit")
    settings = read_vision_folder(tmp_path / "vit").settings()
    for changes, message in (
        ({"model_type": "bert"}, "model_type: expected one of vit, deit, swin"),
        ({"num_hidden_layers": 10**9}, "expected at most 256 layers, got 1000000000"),
        ({"patch_size": [8, 8]}, r"patch_size: expected a whole number from 1 to 4096, got \[8, 8\]"),
        ({"num_channels": 1}, "num_channels: expected 3, got 1"),
        ({"hidden_size": "wide"}, "the settings are not those of a vit model"),
    ):
        changed = {**settings, "config": {**settings["config"], **changes}}
        with pytest.raises(ValueError, match=f"^image_backbone: {message}"):
            models.create("scan", vocab_size=9, feature_dim=192, image_encoder="backbone", image_backbone=changed)
    with pytest.raises(ValueError, match=r"^image_backbone: expected only with image_encoder backbone, got linear"):
        models.create("scan", vocab_size=9, image_backbone=settings)
    with pytest.raises(ValueError, match=r"^image_backbone: expected the settings of a vision model"):
        models.create("scan", vocab_size=9, feature_dim=192, image_encoder="backbone")
