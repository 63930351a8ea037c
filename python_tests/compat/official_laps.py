"""Checkpoints as the official code of LAPS writes them, and the scores of that code in float64, pair by pair.

The vision model is that of transformers, as in the official code. This file does not use the package.

Inside: `random_laps`, `laps_options`, `official_scores`, `laps_score`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from python_tests.helpers.bert import SIZES, bert_states, random_bert

_VIT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 8}
_SWIN = {"patch_size": 4, "embed_dim": 8, "depths": [2, 1], "num_heads": [1, 2], "window_size": 7, "mlp_ratio": 2.0}
_MEAN, _STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def laps_options(**changes: object) -> argparse.Namespace:
    """Return the parsed options of the official command line, with small sizes; None removes an option."""
    values: dict[str, object] = {
        "data_path": "data/", "dataset": "f30k", "margin": 0.2, "num_epochs": 30, "batch_size": 64, "embed_size": 12,
        "grad_clip": 2.0, "learning_rate": 2e-4, "workers": 8, "log_step": 200, "val_step": 500,
        "logger_name": "runs/f30k_vit", "max_violation": False, "vse_mean_warmup_epochs": 1,
        "embedding_warmup_epochs": 0, "f30k_img_path": "images", "coco_img_path": "coco", "img_res": 32,
        "vit_type": "vit", "multi_gpu": 0, "world_size": 1, "rank": 0, "local_rank": 0, "dist_backend": "nccl",
        "dist_url": "env://", "seed": 0, "size_augment": 1, "loss": "vse", "eval": 1, "save_results": 1,
        "evaluate_cxc": 0, "gpu_id": 0, "bert_path": "bert-base-uncased", "lr_schedules": [9, 15, 20, 25],
        "decay_rate": 0.3, "shard_size": 256, "max_word": 90, "aggr_ratio": 0.4, "sparse_ratio": 0.5,
        "attention_weight": 0.8, "ratio_weight": 2.0, "num_patches": 16, "model_name": "runs/f30k_vit",
    }  # fmt: skip
    return argparse.Namespace(**{name: value for name, value in {**values, **changes}.items() if value is not None})


def random_laps(folder: Path, opt: argparse.Namespace, seed: int = 0) -> tuple[dict[str, torch.Tensor], Any]:
    """Return a state dict with the official names and random weights, and its vision model in float64.

    The vision model is saved in `folder`, because `save_pretrained` writes the official names.
    """
    import transformers

    torch.manual_seed(seed)
    if opt.vit_type == "swin":
        vision: Any = transformers.SwinModel(transformers.SwinConfig(**_SWIN, image_size=opt.img_res))
    else:
        vision = transformers.ViTModel(transformers.ViTConfig(**_VIT, image_size=opt.img_res))
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(*shape, generator=random)

    with torch.no_grad():
        for weight in vision.parameters():
            weight.add_(tensor(*weight.shape))
    vision.save_pretrained(folder)
    weights = {f"img_enc.visual_encoder.{name}": one for name, one in load_file(folder / "model.safetensors").items()}
    weights |= {f"txt_enc.bert.{name}": one for name, one in random_bert(seed).items()}
    weights["txt_enc.bert.pooler.dense.weight"] = tensor(24, 24)
    if opt.vit_type == "swin":
        name = "img_enc.visual_encoder.encoder.layers.0.blocks.0.attention.self.relative_position_index"
        weights[name] = torch.zeros(49, 49, dtype=torch.int64)
    size, kept = opt.embed_size, _aggregated(opt)
    for name, inputs, outputs in (
        ("img_enc.vision_proj", vision.config.hidden_size, size), ("txt_enc.fc", SIZES["hidden_size"], size),
        ("cross_net.aggr_net.weight.1", size, int(size * 0.2)), ("cross_net.aggr_net.weight.3", int(size * 0.2), kept),
    ):  # fmt: skip
        if name.startswith("cross_net") or inputs != outputs:
            weights[f"{name}.weight"], weights[f"{name}.bias"] = tensor(outputs, inputs), tensor(outputs)
    weights["cross_net.aggr_net.weight.0.weight"] = 1 + tensor(size)
    weights["cross_net.aggr_net.weight.0.bias"] = tensor(size)
    weights["cross_net.aggr_net.scale"] = 1 + tensor(1, 1, 1)
    return weights, vision.double().eval()


def official_scores(
    weights: Mapping[str, torch.Tensor],
    vision: Any,
    opt: argparse.Namespace,
    pictures: np.ndarray,
    captions: Sequence[list[int]],
) -> np.ndarray:
    """Score pictures (n, side, side, 3) uint8 and captions as piece ids: (n, m) float64."""
    pixels = torch.from_numpy((pictures / 255 - _MEAN) / _STD).permute(0, 3, 1, 2)
    with torch.no_grad():
        states = vision(pixel_values=pixels).last_hidden_state.numpy()
    plain = {name: one.double().numpy() for name, one in weights.items()}
    regions = _linear(plain, "img_enc.vision_proj", states)
    bert = {name.removeprefix("txt_enc.bert."): one for name, one in weights.items() if name.startswith("txt_enc.bert")}
    words = [_linear(plain, "txt_enc.fc", bert_states(bert, ids)) for ids in captions]
    return np.array([[laps_score(plain, opt, one, caption) for caption in words] for one in regions])


def laps_score(
    weights: Mapping[str, np.ndarray], opt: argparse.Namespace, regions: np.ndarray, words: np.ndarray
) -> float:
    """Score one picture (k, d) and one caption (w, d).

    Source: Fu et al., CVPR 2024, section 3, and the official code.
    """
    has_class = math.isqrt(len(regions)) ** 2 != len(regions)
    first, patches = regions[:has_class], regions[has_class:]
    units = _unit(patches)
    significance = units @ _unit(patches.mean(0)) + units @ _unit(words.mean(0))
    order = np.argsort(-significance)
    n_kept = math.ceil(len(patches) * opt.sparse_ratio)
    kept, others = patches[order[:n_kept]], order[n_kept:]
    norm, hidden, last = (f"cross_net.aggr_net.weight.{index}" for index in (0, 1, 3))
    rows = (kept - kept.mean(1, keepdims=True)) / np.sqrt(kept.var(1, keepdims=True) + 1e-5)
    rows = _linear(weights, hidden, rows * weights[f"{norm}.weight"] + weights[f"{norm}.bias"])
    rows = rows * (1 + np.vectorize(math.erf)(rows / math.sqrt(2))) / 2
    powers = np.exp(_linear(weights, last, rows) * weights["cross_net.aggr_net.scale"].item())
    aggregated = (powers / powers.sum(0)).T @ kept
    shares = np.exp(significance[others])
    rest = (shares / shares.sum()) @ patches[others]
    tokens = _unit(np.concatenate([first, aggregated, rest[None]]))
    cosines = tokens @ _unit(words).T
    cosines = np.where(cosines > 0, cosines, 0.1 * cosines)
    return float(cosines.max(0).mean() + cosines.max(1).mean())


def _aggregated(opt: argparse.Namespace) -> int:
    return int(opt.num_patches * opt.aggr_ratio * opt.sparse_ratio)


def _linear(weights: Mapping[str, Any], name: str, rows: np.ndarray) -> np.ndarray:
    """Apply a linear layer; one that the file lacks is the identity."""
    if f"{name}.weight" not in weights:
        return rows
    return rows @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)
