"""Create the model of a run.

Inside: `create_model`, `check_regions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from itm_fast import config as settings
from itm_fast import models
from itm_fast.data import PrecomputedDataset, Vocabulary
from itm_fast.models.bert_folder import bert_options, load_bert
from itm_fast.training.backbone import (
    backbone_options,
    check_towers,
    load_backbone,
    read_backbone,
    regions_of,
    set_checkpointing,
)
from itm_fast.training.clip import clip_options, load_clip, read_clip
from itm_fast.training.config import TrainConfig
from itm_fast.training.start import read_start

__all__ = ["check_regions", "create_model"]

# Settings of a model that the data decide, and that a user therefore cannot give.
_FROM_DATA = ("vocab_size", "feature_dim", "n_regions")


def create_model(config: TrainConfig, vocabulary: Vocabulary, data: PrecomputedDataset) -> models.MatchingModel:
    """Create the model named by `config`, with sizes from the data and weights from torch's random state."""
    for name in _FROM_DATA:
        if name in config.model_options:
            raise ValueError(f"model_options: {name} follows from the data and cannot be given")
    if config.model == "fdf":
        raise ValueError("model: fdf is what --conversions N makes of another model; name that one")
    known = settings.fields_of(models.config_class(config.model))
    if config.start is not None:
        start = read_start(config, vocabulary, data)
        model = _model(config, {**start.options, **config.model_options})
        start.copy_weights(model)
        check_towers(config, model)
        set_checkpointing(config, model)
        return model
    from_data = {
        "vocab_size": len(vocabulary),
        "feature_dim": int(data.features.shape[2]),
        "n_regions": int(data.features.shape[1]),
    }
    clip, folder = read_clip(config, data), read_backbone(config, data, known)
    if folder is not None:
        from_data["n_regions"] = regions_of(config, folder, data)
    sizes = {name: value for name, value in from_data.items() if name in known}
    options = {
        **config.model_options,
        **_bert_options(config, vocabulary, known),
        **backbone_options(config, folder, data, known),
        **sizes,
        **clip_options(config, clip),
    }
    model = _model(config, options)
    if folder is not None:
        load_backbone(config, model, folder)
    if clip is not None:
        load_clip(config, model, clip)
    if config.bert is not None:
        load_bert(model.get_submodule("text_encoder.bert"), config.bert, model.beside_bert())
    return model


def check_regions(model: models.MatchingModel, data: PrecomputedDataset) -> None:
    """Raise ValueError if the model needs a fixed number of regions, and images of `data` have another one."""
    config = model.encoder_config
    needed = getattr(config, "n_regions", None)
    if needed is None or getattr(config, "image_backbone", None):
        return
    width, counts = int(data.features.shape[1]), data.source.counts
    least, most = (width, width) if counts is None else (int(counts.min()), int(counts.max()))
    if (least, most) != (needed, needed):
        found = f"{least}" if least == most else f"{least} to {most}"
        raise ValueError(
            f"model: {model.name} needs {needed} regions in each image, but split {data.split} has {found}"
        )


def _model(config: TrainConfig, options: dict[str, Any]) -> models.MatchingModel:
    """Create the model named by `config`, with FDF around it if there are conversions."""
    if config.conversions is None:
        return models.create(config.model, **options)
    if config.model not in models.FDF_HOSTS:
        raise ValueError(f"conversions: expected one of the models {', '.join(models.FDF_HOSTS)}, got {config.model}")
    return models.create(
        "fdf",
        host=config.model,
        host_options=options,
        conversions=config.conversions,
        conversion=config.conversion_layer,
        conversion_residual=config.conversion_residual and config.conversion_layer == "ffn",
        reweighting=config.reweighting,
        normalize_fused=config.normalize_fused,
    )


def _bert_options(config: TrainConfig, vocabulary: Vocabulary, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the model that follow from the BERT folder."""
    if config.bert is None:
        default = known["text_encoder"].default if "text_encoder" in known else None
        if config.model_options.get("text_encoder", default) == "bert":
            raise ValueError("bert: text_encoder bert needs the folder of a BERT model: --bert DIR")
        return {}
    if "text_encoder" not in known:
        raise ValueError(f"bert: the model {config.model} cannot read captions with BERT")
    options = bert_options(config.bert, len(vocabulary))
    for name, value in options.items():
        given = config.model_options.get(name, value)
        if given != value:
            raise ValueError(f"model_options: {name}: expected {value} with the BERT in {config.bert}, got {given}")
    return options
