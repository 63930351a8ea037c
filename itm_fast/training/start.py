"""Start a training from a trained model: its kind, settings, vocabulary and weights (`--start RUN`).

With new conversions (FDF), only the extractors of the trained model are used, because conversions replace its encoder
heads.

Inside: `Start`, `read_start`, `recipe_for_start`, `start_model`, `start_digest`, `start_vocabulary`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from itm_fast import config as settings
from itm_fast import models
from itm_fast.data import PrecomputedDataset, Vocabulary
from itm_fast.data.digests import sha256_of_parts
from itm_fast.files import regular
from itm_fast.files.messages import shortened, shown
from itm_fast.files.run_files import VOCABULARY
from itm_fast.models import FDF, FDFConfig, MatchingModel
from itm_fast.models.base import CONFIG_FILE, check_shapes, read_config, shapes_of
from itm_fast.training.backbone import check_whole_pictures
from itm_fast.training.config import TrainConfig

__all__ = ["Start", "read_start", "recipe_for_start", "start_digest", "start_model", "start_vocabulary"]

# What a model with conversions shares with its host.
_EXTRACTORS = ("image_encoder.", "text_encoder.")


@attrs.frozen(eq=False)
class Start:
    """The trained model of `folder`, from which a training starts."""

    folder: str
    model: MatchingModel

    @property
    def options(self) -> Mapping[str, Any]:
        """Return the settings of the model, or those of the host of its conversions."""
        found: Mapping[str, Any] = settings.to_dict(self.model.config)
        return found["host_options"] if isinstance(self.model, FDF) else found

    def copy_weights(self, model: MatchingModel) -> None:
        """Copy the weights into `model`; new conversions get none.

        Raises:
            ValueError: a weight is missing, unknown or of another shape; the message names the first one.
        """
        kept, expected = self.model.state_dict(), shapes_of(model)
        if isinstance(model, FDF) and not isinstance(self.model, FDF):
            expected = {name: shape for name, shape in expected.items() if name.startswith(_EXTRACTORS)}
            # The last layer of an extractor may belong to the heads.
            kept = {name: tensor for name, tensor in kept.items() if name in expected}
        check_shapes(expected, {name: tuple(one.shape) for name, one in kept.items()}, f"start: {self.folder}")
        model.load_state_dict(kept, strict=False)


def read_start(config: TrainConfig, vocabulary: Vocabulary, data: PrecomputedDataset) -> Start:
    """Read the trained model that `config` starts from.

    Args:
        config: the settings of the run.
        vocabulary: that of the run.
        data: the training split.

    Raises:
        ValueError: the folder contains no model or another one, another setting does not go with it, or it does not
            read these data.
    """
    assert config.start is not None
    model = models.load(config.start)
    name = start_model(config.start)
    if config.model != name:
        raise ValueError(f"start: {config.start} contains the model {name}, but {config.model} is trained")
    if isinstance(model, FDF):
        _check_conversions(config, model)
    if model.tokenizer is not None and model.tokenizer != vocabulary:
        # `start_vocabulary` gave that of the model; masks are added later. A resumed run has its own.
        if model.tokenizer.with_mask() == vocabulary:
            raise ValueError(
                f"text_augmentation: the vocabulary of {config.start} has no {Vocabulary.mask_word}; turn it off, or "
                "start from a model that was trained with it"
            )
        raise ValueError(f"start: the vocabulary of {config.start} is not that of the run")
    _check_images(config, model, data)
    return Start(config.start, model)


def start_model(folder: str) -> str:
    """Return the name of the model in a folder, or of the host of its conversions; ValueError if there is none."""
    if Path(folder).is_file():
        raise ValueError(f"start: expected the folder of a trained model, found a file: {folder}")
    name, options = read_config(Path(folder) / CONFIG_FILE)
    return str(options.get("host")) if name == FDF.name else name


def recipe_for_start(recipe: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return the settings of a recipe for a training from the model in `folder`, which has its own in their place.

    Raises:
        ValueError: as `start_model`.
    """
    kept = {name: value for name, value in recipe.items() if name not in ("model_options", "image_class_token")}
    start_model(folder)
    name, options = read_config(Path(folder) / CONFIG_FILE)
    if name == FDF.name and kept.get("conversions") is not None:
        kept |= _conversions_of(settings.build(FDFConfig, options))
        if kept["conversions"] == 1:
            kept.pop("other_batches", None)  # A single conversion sees no other batch.
    return kept


def start_digest(folder: str) -> str:
    """Return the SHA-256 of the kind and the settings of the model in a folder."""
    return sha256_of_parts(json.dumps(read_config(Path(folder) / CONFIG_FILE), sort_keys=True).encode())


def start_vocabulary(config: TrainConfig) -> Path | None:
    """Return the vocabulary of the model that `config` starts from; None if it starts from none.

    Raises:
        ValueError: the folder contains none, or `config` names another one.
    """
    if config.start is None:
        return None
    own = Path(config.start) / VOCABULARY
    if not regular.is_file(own):
        raise ValueError(f"start: {config.start} contains no {VOCABULARY}, the vocabulary of the model's training")
    if config.vocab is not None and not regular.is_file(config.vocab):
        raise ValueError(f"{config.vocab}: no such vocabulary file")
    if config.vocab is not None and Vocabulary.from_file(config.vocab) != Vocabulary.from_file(own):
        raise ValueError(f"vocab: expected that of the model to start from, {own}, or none, got {config.vocab}")
    return own


def _check_conversions(config: TrainConfig, model: FDF) -> None:
    """Raise ValueError if the conversions of the run are not those of the trained model."""
    for name, value in _conversions_of(model.config).items():
        found = getattr(config, name)
        if found != value:
            raise ValueError(f"{name}: the model in {config.start} has {shown(value)}, got {shown(found)}")


def _conversions_of(config: FDFConfig) -> dict[str, Any]:
    """Return the training settings that a model with conversions has."""
    found = {
        "conversions": config.conversions,
        "conversion_layer": config.conversion,
        "reweighting": config.reweighting,
        "normalize_fused": config.normalize_fused,
    }
    # Only a feed-forward network can have a residual.
    return found | ({"conversion_residual": config.conversion_residual} if config.conversion == "ffn" else {})


def _check_images(config: TrainConfig, model: MatchingModel, data: PrecomputedDataset) -> None:
    """Raise ValueError if the model does not read images like those of `data`."""
    regions, width = (int(size) for size in data.features.shape[1:])
    of_model = model.encoder_config
    if getattr(of_model, "image_backbone", None):
        check_whole_pictures("start", config, data)
        encode = model.base_images if isinstance(model, FDF) else model.get_submodule("image_encoder")
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                regions = len(encode(torch.zeros(1, regions, width)).values)
        except (RuntimeError, ValueError) as error:
            reason = shortened(" ".join(str(error).split()), 300)
            raise ValueError(f"start: the pictures do not fit the model in {config.start} ({reason})") from None
        width = of_model.feature_dim
    for what, found, wanted in (
        ("values in each region", width, getattr(of_model, "feature_dim", width)),
        ("regions in each image", regions, getattr(of_model, "n_regions", regions)),
    ):
        if found != wanted:
            raise ValueError(
                f"start: the model in {config.start} reads {wanted} {what}, but {data.directory} has {found}"
            )
