"""The vision model of a run: its settings, its weights and how its layers are computed.

Inside: `read_backbone`, `check_pictures`, `check_whole_pictures`, `backbone_options`, `regions_of`, `load_backbone`,
`check_towers`, `set_checkpointing`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch

from itm_fast.data import PrecomputedDataset
from itm_fast.data.picture_shards import StoredPictures
from itm_fast.files.messages import shortened
from itm_fast.models import MatchingModel
from itm_fast.models.vision_folder import VisionFolder, read_vision_folder
from itm_fast.nn import BackboneEncoder
from itm_fast.training.branch import BACKBONE, TEXT_TOWER
from itm_fast.training.config import TrainConfig

__all__ = [
    "backbone_options",
    "check_pictures",
    "check_towers",
    "check_whole_pictures",
    "load_backbone",
    "read_backbone",
    "regions_of",
    "set_checkpointing",
]

_ONLY_WITH_BACKBONE = ("image_class_token", "image_frozen_epochs", "image_checkpointing")
_ONLY_WITH_TEXT_TOWER = ("text_frozen_epochs", "text_checkpointing")


def read_backbone(config: TrainConfig, data: PrecomputedDataset, known: Collection[str]) -> VisionFolder | None:
    """Read the folder of the vision model; None if the run has none.

    Args:
        config: the settings of the run.
        data: the training split.
        known: names of the settings of the model.

    Raises:
        ValueError: the model has no image encoder, the data are no pictures, another setting does not fit, or the
            folder is not that of a vision model.
    """
    if config.image_backbone is None:
        if config.model_options.get("image_encoder") == "backbone":
            raise ValueError("image_backbone: image_encoder backbone needs a vision model: --image-backbone DIR")
        for name in _ONLY_WITH_BACKBONE if config.clip is None else ():
            if getattr(config, name):
                raise ValueError(f"{name}: expected only with --image-backbone DIR or --clip DIR")
        return None
    if "image_encoder" not in known:
        raise ValueError(f"image_backbone: the model {config.model} has no image encoder that could be replaced")
    for name in ("image_backbone", "image_class_token", "image_encoder"):
        if config.model_options.get(name, "backbone" if name == "image_encoder" else None) not in (None, "backbone"):
            raise ValueError(f"model_options: {name} follows from --image-backbone and cannot be given")
    check_whole_pictures("image_backbone", config, data)
    return read_vision_folder(config.image_backbone)


def check_whole_pictures(name: str, config: TrainConfig, data: PrecomputedDataset) -> None:
    """Raise ValueError naming the setting `name` if the vision model would not get whole pictures."""
    _check_stored(name, data)
    if config.region_augmentation:
        option = "--" + name.replace("_", "-")
        raise ValueError(f"region_augmentation: expected 0 with {option}, which needs whole pictures")


def check_pictures(config: TrainConfig, data: PrecomputedDataset) -> None:
    """Raise ValueError if the training pictures of `data` cannot be augmented as `config` says."""
    _check_stored("picture_augmentation", data)
    if config.features not in ("auto", "disk"):
        raise ValueError(
            f"features: expected auto or disk with --picture-augmentation, which decodes pictures for each batch, got "
            f"{config.features}"
        )


def _check_stored(name: str, data: PrecomputedDataset) -> None:
    if not isinstance(data.features, StoredPictures):
        raise ValueError(
            f"{name}: expected pictures, but {data.directory} contains features; import pictures with itm-fast data "
            "import without --encoder"
        )


def backbone_options(
    config: TrainConfig, folder: VisionFolder | None, data: PrecomputedDataset, known: Collection[str]
) -> dict[str, Any]:
    """Return the settings of the model that follow from the folder of the vision model, or from pictures without one.

    Pixels that only a linear layer reads teach a model little, so patches are encoded by convolutions unless an image
    encoder is given.
    """
    if folder is not None:
        return {
            "image_encoder": "backbone",
            "image_backbone": folder.settings(),
            "image_class_token": config.image_class_token,
        }
    pixels = isinstance(data.features, StoredPictures) and "image_encoder" in known
    return {"image_encoder": "patches"} if pixels and "image_encoder" not in config.model_options else {}


def regions_of(config: TrainConfig, folder: VisionFolder, data: PrecomputedDataset) -> int:
    """Return the regions of each picture, after encoding one without colour.

    Raises:
        ValueError: the model does not take pictures of this size.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        width = int(data.features.shape[2])
        encoder = BackboneEncoder(width, 1, folder.settings(), class_token=config.image_class_token).eval()
        try:
            return len(encoder(torch.zeros(1, *data.features.shape[1:])).values)
        except RuntimeError as error:
            reason = shortened(" ".join(str(error).split()), 300)
            side = cast(StoredPictures, data.features).side
            raise ValueError(f"{folder.folder}: pictures of {side} pixels do not fit the model ({reason})") from None


def load_backbone(config: TrainConfig, model: MatchingModel, folder: VisionFolder) -> None:
    """Copy the weights of the folder into the model."""
    folder.copy_weights(model.get_submodule(BACKBONE.rstrip(".")))
    set_checkpointing(config, model)


def check_towers(config: TrainConfig, model: MatchingModel) -> None:
    """Raise ValueError naming a setting of a vision model or a text tower that the given model does not have."""
    names = [name for name, _ in model.named_parameters()]
    for prefix, own in ((BACKBONE, _ONLY_WITH_BACKBONE), (TEXT_TOWER, _ONLY_WITH_TEXT_TOWER)):
        if not any(name.startswith(prefix) for name in names):
            for setting in own:
                if getattr(config, setting):
                    raise ValueError(f"{setting}: the {model.name} to train has no {prefix.rstrip('.')}")


def set_checkpointing(config: TrainConfig, model: MatchingModel) -> None:
    """Let the layers of pretrained models be computed again in the backward pass, as `config` says.

    Raises:
        ValueError: the module is not of a kind that can do this.
    """
    for name, prefix in (("image_checkpointing", BACKBONE), ("text_checkpointing", TEXT_TOWER)):
        if getattr(config, name):
            backbone: Any = model.get_submodule(prefix.rstrip("."))
            # Version 5 of transformers has another name for it.
            new = getattr(backbone, "activation_checkpointing_enable", None)
            enable = getattr(backbone, "gradient_checkpointing_enable", None) if new is None else new
            if enable is None:
                raise ValueError(f"{name}: a {type(backbone).__name__} cannot compute its layers again; turn it off")
            enable({"use_reentrant": False})
