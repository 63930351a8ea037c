"""Start a training from a trained model: its kind, settings, vocabulary and weights (`--start RUN`).

With new conversions (FDF), only the extractors of the trained model are used, because conversions replace its encoder
heads.

Inside: `Start`, `read_start`, `start_model`, `start_vocabulary`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from itm_fast import config as settings
from itm_fast import models
from itm_fast.data import PrecomputedDataset, Vocabulary
from itm_fast.files import regular
from itm_fast.files.messages import shortened
from itm_fast.files.run_files import VOCABULARY
from itm_fast.models import FDF, MatchingModel
from itm_fast.models.base import CONFIG_FILE, check_shapes, read_config, shapes_of
from itm_fast.training.backbone import check_whole_pictures
from itm_fast.training.config import TrainConfig

__all__ = ["Start", "read_start", "start_model", "start_vocabulary"]

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
    found = model.config.conversions if isinstance(model, FDF) else None
    if found is not None and config.conversions != found:
        raise ValueError(f"start: {config.start} contains {found} conversions; expected --conversions {found}")
    name = start_model(config.start)
    if config.model != name:
        raise ValueError(f"start: {config.start} contains the model {name}, but {config.model} is trained")
    _check_words(config, model, vocabulary)
    _check_images(config.start, model, config, data)
    return Start(config.start, model)


def start_model(folder: str) -> str:
    """Return the name of the model in a folder, or of the host of its conversions; ValueError if there is none."""
    name, options = read_config(Path(folder) / CONFIG_FILE)
    return str(options.get("host")) if name == FDF.name else name


def start_vocabulary(config: TrainConfig) -> Path | None:
    """Return the vocabulary of the model that `config` starts from; None if there is none.

    Raises:
        ValueError: `config` names another one.
    """
    own = None if config.start is None else Path(config.start) / VOCABULARY
    if own is None or not regular.is_file(own):
        return None
    if config.vocab is not None:
        raise ValueError(f"vocab: the model in {config.start} has its own vocabulary; expected no other")
    return own


def _check_words(config: TrainConfig, model: MatchingModel, vocabulary: Vocabulary) -> None:
    known = getattr(model.encoder_config, "vocab_size", len(vocabulary))
    if len(vocabulary) == known:
        return
    if config.text_augmentation and model.tokenizer is not None:
        raise ValueError(
            f"text_augmentation: the vocabulary of {config.start} has no {Vocabulary.mask_word}; turn it off, or start "
            "from a model that was trained with it"
        )
    raise ValueError(
        f"start: the model in {config.start} knows {known:,} words, but the vocabulary has {len(vocabulary):,}; pass "
        "that of its training with --vocab FILE"
    )


def _check_images(folder: str, model: MatchingModel, config: TrainConfig, data: PrecomputedDataset) -> None:
    """Raise ValueError if the model does not read images like those of `data`."""
    regions, width = (int(size) for size in data.features.shape[1:])
    of_model = model.encoder_config
    if getattr(of_model, "image_backbone", None):
        check_whole_pictures("start", config, data)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                model.encode_images(torch.zeros(1, regions, width))
        except (RuntimeError, ValueError) as error:
            reason = shortened(" ".join(str(error).split()), 300)
            raise ValueError(f"start: the pictures do not fit the model in {folder} ({reason})") from None
        return
    for what, found, wanted in (
        ("values in each region", width, getattr(of_model, "feature_dim", width)),
        ("regions in each image", regions, getattr(of_model, "n_regions", regions)),
    ):
        if found != wanted:
            raise ValueError(f"start: the model in {folder} reads {wanted} {what}, but {data.directory} has {found}")
