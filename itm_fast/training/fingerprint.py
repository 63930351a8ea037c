"""Detect that the data, the model or the loss of a resumed run have changed.

Inside: `fingerprints`, `model_fingerprint`, `check_fingerprints`, `made_with`, `check_made_with`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from itm_fast import config as settings
from itm_fast.data import PrecomputedDataset
from itm_fast.data.digests import sha256_of_parts
from itm_fast.files.messages import shown
from itm_fast.models.base import MatchingModel
from itm_fast.training.branch import frozen_epochs
from itm_fast.training.config import TrainConfig
from itm_fast.training.own import OwnData, OwnLoss
from itm_fast.training.start import start_digest

__all__ = ["check_fingerprints", "check_made_with", "fingerprints", "made_with", "model_fingerprint"]


# As states of earlier versions name it.
_FROZEN = "frozen weights (itm-fast realign)"
# Options of models that change memory and time only.
_OF_MEMORY = ("chunk_pairs",)


def fingerprints(data: PrecomputedDataset | OwnData) -> dict[str, str]:
    """Return SHA-256 digests by file name: captions with their images, features (file size and blocks), vocabulary.

    A lossless feature store has the digests of its source. A user's own data set has one digest for all.
    """
    if isinstance(data, OwnData):
        return data.fingerprints()
    tags = {f"{data.split}_tags.txt": sha256_of_parts("\n".join(data.tags or ()).encode())} if data.reads_tags else {}
    boxes = {}
    if data.reads_boxes and data.box_source is not None:
        boxes[f"{data.split}_boxes.npy"] = sha256_of_parts(data.box_source.values.numpy().tobytes())
    return {
        **tags,
        **boxes,
        f"{data.split}_caps.txt": sha256_of_parts(
            "\n".join(data.captions).encode(), data.caption_image.numpy().tobytes()
        ),
        f"{data.split}_ims.npy": data.features_digest(),
        "vocab.json": sha256_of_parts("\n".join(data.vocabulary.words).encode()),
    }


def model_fingerprint(config: TrainConfig, model: MatchingModel) -> dict[str, str]:
    """Return what weight shapes do not show: the architecture of pretrained models, and which weights are frozen."""
    found = {}
    if config.bert is not None:
        found["config.json of the BERT model"] = f"num_attention_heads {model.encoder_config.bert_heads}"
    if config.image_backbone is not None:
        found["config.json of the vision model"] = json.dumps(model.encoder_config.image_backbone, sort_keys=True)
    if config.start is not None:
        found["config.json of the model to start from"] = start_digest(config.start)
    if config.clip is not None:
        towers = (model.encoder_config.image_backbone, model.encoder_config.text_backbone)
        found["config.json of the CLIP"] = json.dumps(towers, sort_keys=True)
    # Pretrained weights may be frozen for some epochs only.
    frozen = [
        (name, weight)
        for name, weight in model.named_parameters()
        if not weight.requires_grad and not frozen_epochs(config, name)
    ]
    if frozen:
        parts = (part for name, weight in frozen for part in (name.encode(), _bytes(weight)))
        found[_FROZEN] = sha256_of_parts(*parts)
    return found


def _bytes(weight: Tensor) -> bytes:
    # NumPy has no bfloat16.
    return weight.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def check_fingerprints(before: dict[str, str], now: dict[str, str], source: Path) -> None:
    """Raise ValueError naming the first file that differs from the one that the state `source` was saved with."""
    for name in {**now, **before}:
        if before.get(name) != now.get(name):
            if name == _FROZEN:
                raise ValueError(
                    f"frozen weights: not those that the run to resume was started with ({source}); build the model "
                    "with the same seed and the same pretrained weights"
                )
            raise ValueError(f"{name}: its content is not what the run to resume was started with ({source})")


def made_with(model: MatchingModel, loss: nn.Module | None) -> dict[str, Any]:
    """Return what the settings of a run may not have: the options of its model, and the name of a loss from Python."""
    made: Any = loss.function if isinstance(loss, OwnLoss) else loss
    made = getattr(made, "_orig_mod", made)  # Of a compiled module.
    config = getattr(model, "config", None)
    options = settings.to_dict(config) if attrs.has(type(config)) else {}
    named = {f"model: {name}": value for name, value in options.items() if name not in _OF_MEMORY}
    return {
        "loss": None if made is None else getattr(made, "__name__", type(made).__name__),
        **json.loads(json.dumps(named)),
    }


def check_made_with(before: Any, now: Mapping[str, Any], source: Path) -> None:
    """Raise ValueError naming the first part that differs. States of earlier versions have none."""
    known = before if isinstance(before, dict) else {}
    for name, value in now.items():
        if name in known and known[name] != value:
            raise ValueError(
                f"{name}: the run to resume was started with {shown(known[name])}, got {shown(value)} ({source})"
            )
