"""A stand-in for the package timm, which needs a torchvision that fits torch: three small models with its interface.

Inside: `timm_stand_in`, `write_model`.
"""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

SIDE = 16


class _Vit(nn.Module):
    num_prefix_tokens = 2

    def __init__(self, *, depth: int = 1, dynamic_img_size: bool = False) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, stride=4)
        self.cls_token, self.reg_token = (nn.Parameter(torch.randn(1, 1, 8)) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.fc_norm, self.head, self.checkpointing = nn.LayerNorm(8), nn.Identity(), False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.checkpointing = enable

    def forward_features(self, pixels: Tensor) -> Tensor:
        special = torch.cat([self.cls_token, self.reg_token], 1).expand(len(pixels), -1, -1)
        tokens = torch.cat([special, self.patch_embed(pixels).flatten(2).transpose(1, 2)], 1)
        for block in self.blocks:
            tokens = tokens + block(tokens).tanh()
        return tokens


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 8, stride=8), nn.BatchNorm2d(6)
        self.head = nn.Sequential(nn.Linear(6, 6))

    def forward_features(self, pixels: Tensor) -> Tensor:
        return self.norm(self.stem(pixels)).tanh()


class _Windows(_Convolutions):
    output_fmt = "NHWC"

    def __init__(self, *, strict_img_size: bool = True) -> None:
        super().__init__()
        self.strict = strict_img_size

    def forward_features(self, pixels: Tensor) -> Tensor:
        if self.strict and pixels.shape[-1] != SIDE:
            raise AssertionError("another size")
        return super().forward_features(pixels).permute(0, 2, 3, 1)


_MODELS = {"vit": _Vit, "convolutions": _Convolutions, "windows": _Windows}


def _create_model(
    name: str, pretrained: bool = False, checkpoint_path: str | None = None, num_classes: int = 1000, **options: Any
) -> nn.Module:
    assert not pretrained
    assert checkpoint_path is None
    assert num_classes == 0
    return _MODELS[name](**options)


def timm_stand_in() -> types.ModuleType:
    """Return the module."""
    module: Any = types.ModuleType("timm")
    module.__version__, module.is_model, module.create_model = "0", _MODELS.__contains__, _create_model
    return module


def write_model(folder: Path, name: str = "vit", **arguments: Any) -> Any:
    """Write a model with random weights, also of a classifier, as timm stores it; return it in evaluation mode."""
    torch.manual_seed(0)
    model = _MODELS[name](**arguments).eval()
    if name != "vit":
        nn.init.uniform_(model.norm.running_mean, -1, 1)
    folder.mkdir()
    save_file({**model.state_dict(), "head.fc.weight": torch.ones(3, 8)}, folder / "model.safetensors")
    content = {
        "architecture": name,
        "num_classes": 3,
        "model_args": {"num_classes": 3, **arguments},
        "pretrained_cfg": {"input_size": [3, SIDE, SIDE], "crop_pct": 0.9, "std": [0.5, 0.4, 0.3]},
    }
    (folder / "config.json").write_text(json.dumps(content))
    return model
