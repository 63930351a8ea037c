"""Small pictures as files, their captions, and small vision models with random weights in the layout of transformers.

Inside: `write_pictures`, `write_captions`, `write_encoder`, `ENCODERS`, `SIDE`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from itm_fast.data import emoji

SIDE = 32
_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE, "patch_size": 8}
_TOWER = {**_SIZES, "intermediate_size": 32}
_TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
_SWIN = {
    "image_size": SIDE, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4
}  # fmt: skip
_SQUARE = {"height": SIDE, "width": SIDE}
_CROPPED = {"size": {"shortest_edge": 36}, "crop_size": _SQUARE}


def _package() -> Any:
    """Import transformers when a test needs it, as that takes seconds."""
    import transformers

    return transformers


def _processor(name: str, **options: Any) -> Any:
    """Return an image processor that resizes with Pillow; the one of torchvision rounds differently."""
    return getattr(_package(), f"{name}Pil" if hasattr(_package(), f"{name}Pil") else name)(**options)


# For each model: how to make it, and its image processor, both of transformers.
ENCODERS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], object]]] = {
    "vit": (
        lambda: _package().ViTForImageClassification(_package().ViTConfig(**_TOWER)),
        lambda: _processor("ViTImageProcessor", size=_SQUARE),
    ),
    "deit": (
        lambda: _package().DeiTModel(_package().DeiTConfig(**_TOWER)),
        lambda: _processor("DeiTImageProcessor", size={"height": 36, "width": 36}, crop_size=_SQUARE),
    ),
    "swin": (
        lambda: _package().SwinModel(_package().SwinConfig(**_SWIN)),
        lambda: _processor("ViTImageProcessor", size=_SQUARE, resample=3, image_mean=[0.4, 0.5, 0.6]),
    ),
    "dinov2": (
        lambda: _package().Dinov2Model(_package().Dinov2Config(**_SIZES)),
        lambda: _processor("BitImageProcessor", **_CROPPED, image_std=[0.2, 0.3, 0.4]),
    ),
    "dinov2_with_registers": (
        lambda: _package().Dinov2WithRegistersModel(
            _package().Dinov2WithRegistersConfig(**_SIZES, num_register_tokens=3)
        ),
        lambda: _processor("BitImageProcessor", **_CROPPED),
    ),
    "clip": (
        lambda: _package().CLIPModel(
            _package().CLIPConfig(text_config={**_TEXT, "eos_token_id": 2}, vision_config=_TOWER)
        ),
        lambda: _processor("CLIPImageProcessor", **_CROPPED),
    ),
    "siglip": (
        lambda: _package().SiglipModel(_package().SiglipConfig(text_config=_TEXT, vision_config=_TOWER)),
        lambda: _processor("SiglipImageProcessor", size=_SQUARE),
    ),
}


def write_encoder(folder: Path, kind: str = "vit", seed: int = 0) -> torch.nn.Module:
    """Write a model with random weights and its image processor; return the model in evaluation mode."""
    make, processor = ENCODERS[kind]
    torch.manual_seed(seed)
    model = make().eval()
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return model


def write_pictures(folder: Path, count: int, split: str = "train") -> list[str]:
    """Write bundled emoji as PNG files; return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{name}.png" for name in emoji.image_ids(split)[:count]]
    for name, pixels in zip(names, emoji.pictures(split), strict=False):
        Image.fromarray(pixels).save(folder / name)
    return names


def write_captions(path: Path, names: list[str], split: str = "train") -> Path:
    """Write the captions of emoji, two each, as CSV."""
    captions = emoji.captions(split)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = [(name, captions[5 * number + index]) for number, name in enumerate(names) for index in range(2)]
        csv.writer(file).writerows([("image", "caption"), *rows])
    return path
