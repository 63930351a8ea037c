"""The CLIP or SigLIP of a run: its folder, the settings of the model that follow from it, and its weights.

Inside: `read_clip`, `clip_options`, `load_clip`.
"""

from __future__ import annotations

from typing import Any

from itm_fast.data import PrecomputedDataset
from itm_fast.models import MatchingModel
from itm_fast.models.clip_folder import ClipFolder, read_clip_folder
from itm_fast.training.backbone import check_whole_pictures, regions_of, set_checkpointing
from itm_fast.training.config import TrainConfig

__all__ = ["clip_options", "load_clip", "read_clip"]

_ONLY_WITH_CLIP = ("text_frozen_epochs", "text_checkpointing")


def read_clip(config: TrainConfig, data: PrecomputedDataset) -> ClipFolder | None:
    """Read the folder of the CLIP or SigLIP; None if the run has none.

    Args:
        config: the settings of the run.
        data: the training split.

    Raises:
        ValueError: the model is another one or lacks its folder, the data are no pictures or of a size that does not
            fit, another setting does not fit, or the folder is not that of a CLIP or SigLIP.
    """
    if config.clip is None:
        if config.model == "clip":
            raise ValueError("clip: the model clip needs the folder of a CLIP or SigLIP: --clip DIR")
        for name in _ONLY_WITH_CLIP:
            if getattr(config, name):
                raise ValueError(f"{name}: expected only with --clip DIR")
        return None
    if config.model != "clip":
        raise ValueError(f"clip: expected only with --model clip, got {config.model}; see --image-backbone")
    for name in ("bert", "image_backbone"):
        if getattr(config, name) is not None:
            raise ValueError(f"{name}: expected none with --clip, whose folder has both towers")
    check_whole_pictures("clip", config, data)
    folder = read_clip_folder(config.clip)
    for name in (*folder.settings(), "image_class_token"):
        if name in config.model_options:
            raise ValueError(f"model_options: {name} follows from --clip and cannot be given")
    regions_of(config, folder.vision, data)
    return folder


def clip_options(config: TrainConfig, folder: ClipFolder | None) -> dict[str, Any]:
    """Return the settings of the model that follow from the folder and the options of the run."""
    return {} if folder is None else {**folder.settings(), "image_class_token": config.image_class_token}


def load_clip(config: TrainConfig, model: MatchingModel, folder: ClipFolder) -> None:
    """Copy the weights of the folder into the model."""
    folder.copy_weights(model)
    set_checkpointing(config, model)
