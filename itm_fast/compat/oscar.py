"""Convert models of OSCAR's official code that were fine-tuned for retrieval (Li et al., ECCV 2020), or VinVL's.

Inside: `read`.
"""

from __future__ import annotations

import argparse
from typing import Any

from itm_fast.compat.checkpoint import OfficialCheckpoint, load_file
from itm_fast.compat.encoders import check_words
from itm_fast.compat.options import Options
from itm_fast.compat.vse_infty import bert_sizes
from itm_fast.compat.weights import Names, build_model
from itm_fast.files import regular
from itm_fast.files.documents import MAX_SETTINGS_BYTES, read_json
from itm_fast.files.messages import shown
from itm_fast.models import MatchingModel

__all__ = ["read"]

_NAMES: Names = {
    "bert.embeddings.position_ids": None,
    "bert.img_embedding.": "image_encoder.fc.",
    "bert.LayerNorm.": "image_norm.",
    "bert.pooler.dense.": "text_encoder.pooler.",
    "bert.": "text_encoder.bert.",
    "classifier.": "text_encoder.classifier.",
}
# The settings of all published models for retrieval. A file without one of them has this value.
_FIXED = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "img_layer_norm_eps": 1e-12, "type_vocab_size": 2}


def read(checkpoint: OfficialCheckpoint, vocab_size: int, bert_heads: int | None = None) -> MatchingModel:
    """Build the model of a checkpoint whose one state dict contains BERT, the region layer and the matching head.

    The model reads object tags, as published, unless `training_args.bin` says otherwise.

    Args:
        checkpoint: the checkpoint. `config.json` and `training_args.bin` beside it, which the official code writes, are
            read if they are there.
        vocab_size: number of pieces in the vocabulary of the model.
        bert_heads: number of BERT's attention heads. None: that of `config.json`, else one per 64 channels.

    Raises:
        ValueError: keys, shapes, values, settings or the vocabulary do not fit. The message names the file and the key.
    """
    (weights,) = checkpoint.modules("the whole model")
    check_words(checkpoint, weights, "bert.embeddings.word_embeddings.weight", vocab_size)
    region = weights.weights.get("bert.img_embedding.weight")
    heads = _heads(checkpoint)
    config = {
        **bert_sizes(weights, bert_heads if heads is None or bert_heads is not None else heads),
        "vocab_size": vocab_size,
        "feature_dim": region.tensor.shape[1] if region is not None and region.tensor.dim() == 2 else 1,
        "tags": _has_tags(checkpoint),
        "image_norm": "bert.LayerNorm.weight" in weights.weights,
    }
    return build_model("oscar", config, [(weights, _NAMES)], checkpoint.path)


def _has_tags(checkpoint: OfficialCheckpoint) -> bool:
    """Return whether the model was trained with object tags."""
    path = checkpoint.path.with_name("training_args.bin")
    if not regular.is_present(path):
        return True
    content = load_file(path, [argparse.Namespace])
    if not isinstance(content, argparse.Namespace):
        raise ValueError(f"{path}: expected an argparse.Namespace, got {type(content).__name__}")
    return Options(vars(content), str(path)).get("add_od_labels", False)


def _heads(checkpoint: OfficialCheckpoint) -> int | None:
    """Return the number of heads in `config.json`, None without that file; check what no weight shows."""
    path = checkpoint.path.with_name("config.json")
    if not regular.is_present(path):
        return None
    content: Any = read_json(path, MAX_SETTINGS_BYTES)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {shown(content)}")
    for name, value in _FIXED.items():
        if content.get(name, value) != value:
            raise ValueError(f"{path}: {name}: expected {value}, got {shown(content[name])}")
    heads = content.get("num_attention_heads")
    if heads is not None and (type(heads) is not int or heads < 1):
        raise ValueError(f"{path}: num_attention_heads: expected a number at least 1, got {shown(heads)}")
    return heads
