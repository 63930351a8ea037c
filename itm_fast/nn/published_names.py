"""Weights of models of transformers under the names that published files have.

Inside: `keep_published_names`.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from torch import Tensor, nn

__all__ = ["keep_published_names"]

# The part of an attention layer with query, key and value in published files, by `model_type`.
_INNER = {"vit": "attention", "deit": "attention", "dinov2": "attention", "dinov2_with_registers": "attention",
          "swin": "self"}  # fmt: skip
_PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}


def keep_published_names(encoder: nn.Module, kind: str) -> None:
    """Let the state dict of an encoder name the weights of its `backbone` as published files do.

    Versions of transformers name weights in memory differently, so files with these names could be read with one
    version alone.

    Args:
        encoder: has a model of transformers as `backbone`.
        kind: `model_type` of that model.
    """
    encoder.register_state_dict_post_hook(functools.partial(_publish, kind))
    encoder.register_load_state_dict_pre_hook(functools.partial(_adopt, kind))


def _publish(kind: str, _encoder: nn.Module, weights: dict[str, Any], prefix: str, _metadata: Any) -> None:
    start = f"{prefix}backbone."
    for name in [name for name in weights if name.startswith(start)]:
        published = _published(name.removeprefix(start), kind)
        weight = weights.pop(name)
        if published is not None:
            weights[start + published] = weight


def _adopt(kind: str, encoder: nn.Module, weights: dict[str, Tensor], prefix: str, *_rest: Any) -> None:
    start = f"{prefix}backbone."
    backbone: Any = encoder.backbone
    for name, own in backbone.state_dict().items():
        published = _published(name, kind)
        if published is None:
            weights[start + name] = own
        elif start + published in weights:
            weights[start + name] = weights.pop(start + published)


def _published(name: str, kind: str) -> str | None:
    """Return the published name of a weight; None for a constant, which follows from the sizes."""
    # Version 4 has the towers of a CLIP or SigLIP inside of another module.
    name = re.sub(r"^(vision_model|text_model)\.", "", name)
    if kind not in _INNER:
        return name
    if name.endswith(".relative_position_index"):
        return None
    name = re.sub(r"^layers\.", "encoder.layer.", name)
    for own, published in _PROJECTIONS.items():
        name = name.replace(f".attention.{own}.", f".attention.{_INNER[kind]}.{published}.")
    name = name.replace(".attention.o_proj.", ".attention.output.dense.")
    name = name.replace(".attention.relative_position_bias.", ".attention.self.")
    if not kind.startswith("dinov2"):
        name = name.replace(".mlp.fc1.", ".intermediate.dense.").replace(".mlp.fc2.", ".output.dense.")
    return name
