"""Convert checkpoints of the official code of LAPS (Fu et al., CVPR 2024): ViT or Swin, and BERT.

Inside: `read`.
"""

from __future__ import annotations

import math
import re
from typing import Any

import attrs
import torch

from itm_fast.compat.checkpoint import OfficialCheckpoint, StateDict, Weight
from itm_fast.compat.encoders import check_words
from itm_fast.compat.options import Options
from itm_fast.compat.vse_infty import BERT_NAMES, PIECES, bert_sizes
from itm_fast.compat.weights import Names, build_model
from itm_fast.models import MatchingModel
from itm_fast.nn.vision_backbone import backbone_settings, class_of

__all__ = ["read"]

# Options of the official script that do not change the scores of a trained model.
_TRAINING = (
    "data_path", "dataset", "margin", "num_epochs", "batch_size", "grad_clip", "learning_rate", "workers", "log_step",
    "val_step", "logger_name", "model_name", "max_violation", "vse_mean_warmup_epochs", "embedding_warmup_epochs",
    "f30k_img_path", "coco_img_path", "multi_gpu", "world_size", "rank", "local_rank", "gpu", "gpu_id", "distributed",
    "dist_backend", "dist_url", "seed", "size_augment", "loss", "eval", "save_results", "evaluate_cxc", "bert_path",
    "lr_schedules", "decay_rate", "shard_size", "max_word", "attention_weight", "ratio_weight",
)  # fmt: skip
_IMAGE, _IMAGE_LAYER = "img_enc.visual_encoder.", "img_enc.vision_proj."
_TEXT, _TEXT_LAYER = "txt_enc.", "txt_enc.fc."
_SCALE = "cross_net.aggr_net.scale"
_NAMES: Names = {
    f"{_IMAGE}pooler.": None,
    f"{_IMAGE}embeddings.mask_token": None,
    _IMAGE: "image_encoder.backbone.",
    _IMAGE_LAYER: "image_encoder.fc.",
    **{_TEXT + official: own for official, own in BERT_NAMES.items() if official.startswith("bert.")},
    _TEXT_LAYER: "text_encoder.fc.",
    _SCALE: "similarity.scale",
    "cross_net.aggr_net.weight.": "similarity.weigh.",
}
# The official code normalises the pixels by these numbers, whatever the vision model was pretrained with.
_COLOURS = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
# Patches per side that `data import` cuts pictures into by default.
_GRID = 7


def read(checkpoint: OfficialCheckpoint, vocab_size: int, bert_heads: int | None = None) -> MatchingModel:
    """Build the model of a checkpoint whose one state dict contains both encoders and the similarity.

    Args:
        checkpoint: the checkpoint.
        vocab_size: number of pieces in the vocabulary of the model.
        bert_heads: as in `vse_infty.read`. A ViT has one attention head per 64 channels, as all published ones.

    Raises:
        ValueError: keys, shapes, values, options or the vocabulary do not fit. The message names the file and the key.
    """
    (part,) = checkpoint.modules("the whole model")
    options = checkpoint.options
    options.mark_known(_TRAINING)
    check_words(checkpoint, part, _TEXT + PIECES, vocab_size)
    width = options.get("embed_size", 512)
    side = options.get("img_res", 224)
    swin = "swin" in options.get("vit_type", "vit")
    settings, step = _swin(part, side) if swin else _vit(part)
    if side % step or (not swin and side != settings["image_size"]):
        wanted = f"a multiple of {step}" if swin else f"{settings['image_size']} as in the position embeddings"
        raise options.error("img_res", f"expected {wanted}, got {side}")
    patches = (side // step) ** 2
    if options.get("num_patches", patches) != patches:
        raise options.error("num_patches", f"expected {patches} with img_res {side}")
    captions = {name.removeprefix(_TEXT): one for name, one in part.weights.items() if name.startswith(_TEXT)}
    bert = bert_sizes(StateDict(part.label, captions), bert_heads)
    hidden = _shape(part, f"{_IMAGE}layernorm.weight", 1)[0]
    part = _with_identity(part, _IMAGE_LAYER, hidden, width)
    part = _with_identity(part, _TEXT_LAYER, bert["bert_dim"], width)
    config = {
        **bert,
        "vocab_size": vocab_size,
        "embed_dim": width,
        "feature_dim": 3 * (side // _GRID if side % _GRID == 0 else step) ** 2,
        "image_encoder": "backbone",
        "image_backbone": {"config": settings, **_COLOURS},
        "image_class_token": not swin,
        "n_regions": patches + (not swin),
        "keep_ratio": _ratio(options, "sparse_ratio", 0.5),
        "aggregation_ratio": _ratio(options, "aggr_ratio", 0.4),
    }
    return build_model("laps", config, [(_as_here(part), _NAMES)], checkpoint.path)


def _ratio(options: Options, name: str, default: float) -> float:
    value = options.get(name, default)
    if not 0 < value <= 1:
        raise options.error(name, f"expected a number above 0 and at most 1, got {value}")
    return value


def _vit(part: StateDict) -> tuple[dict[str, Any], int]:
    """Return the settings of a ViT by the shapes of its weights, and the pixels of a patch."""
    dim, _, patch, _ = _shape(part, f"{_IMAGE}embeddings.patch_embeddings.projection.weight", 4)
    places = _shape(part, f"{_IMAGE}embeddings.position_embeddings", 3)[1]
    config = class_of("vit").config_class(
        hidden_size=dim,
        num_hidden_layers=_count(part, r"encoder\.layer\.(\d{1,3})\."),
        num_attention_heads=max(dim // 64, 1),
        intermediate_size=_shape(part, f"{_IMAGE}encoder.layer.0.intermediate.dense.weight", 2)[0],
        image_size=max(math.isqrt(max(places - 1, 0)), 1) * patch,
        patch_size=patch,
    )
    return backbone_settings("vit", config), patch


def _swin(part: StateDict, side: int) -> tuple[dict[str, Any], int]:
    """Return the settings of a Swin by the shapes of its weights, and the pixels of a patch after the last stage."""
    dim, _, patch, _ = _shape(part, f"{_IMAGE}embeddings.patch_embeddings.projection.weight", 4)
    stages = range(_count(part, r"encoder\.layers\.(\d{1,2})\."))
    block = f"{_IMAGE}encoder.layers.%d.blocks.0."
    # A row for each distance of two patches in a window.
    tables = [_shape(part, f"{block % stage}attention.self.relative_position_bias_table", 2) for stage in stages]
    config = class_of("swin").config_class(
        embed_dim=dim,
        depths=[_count(part, rf"encoder\.layers\.{stage}\.blocks\.(\d{{1,3}})\.") for stage in stages],
        num_heads=[heads for _, heads in tables],
        window_size=(math.isqrt(tables[0][0]) + 1) // 2,
        mlp_ratio=_shape(part, f"{block % 0}intermediate.dense.weight", 2)[0] / dim,
        image_size=side,
        patch_size=patch,
    )
    return backbone_settings("swin", config), patch * 2 ** (len(stages) - 1)


def _shape(part: StateDict, name: str, dims: int) -> tuple[int, ...]:
    """Return the shape of a weight; a missing one counts as size 1, as `build_model` reports it."""
    shape = tuple(part.weights[name].tensor.shape) if name in part.weights else ()
    return shape if len(shape) == dims and min(shape) > 0 else (1,) * dims


def _count(part: StateDict, pattern: str) -> int:
    """Return how many layers there are, numbered by the first group of `pattern`."""
    found = (re.match(re.escape(_IMAGE) + pattern, name) for name in part.weights)
    return max((int(match[1]) + 1 for match in found if match), default=1)


def _with_identity(part: StateDict, layer: str, width: int, embed_dim: int) -> StateDict:
    """Add the linear layer that the official code leaves out between equal widths."""
    if width != embed_dim or f"{layer}weight" in part.weights or f"{layer}bias" in part.weights:
        return part
    added = {f"{layer}weight": torch.eye(width), f"{layer}bias": torch.zeros(width)}
    return attrs.evolve(
        part, weights={**part.weights, **{name: Weight(part.key(name), one) for name, one in added.items()}}
    )


def _as_here(part: StateDict) -> StateDict:
    """Leave out the constants that older versions of transformers save, and bring the scale to its shape here."""
    weights = {name: one for name, one in part.weights.items() if not name.endswith(".relative_position_index")}
    scale = weights.get(_SCALE)
    if scale is not None and scale.tensor.numel() == 1:
        weights[_SCALE] = attrs.evolve(scale, tensor=scale.tensor.reshape(()))
    return attrs.evolve(part, weights=weights)
