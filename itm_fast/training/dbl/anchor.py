"""The frozen anchor of the offline asynchronous scenario (OAS), loaded from the run directory of its training.

Inside: `frozen_anchor`.
"""

from __future__ import annotations

import copy
from pathlib import Path

from itm_fast import config as settings
from itm_fast import models
from itm_fast.data import Vocabulary
from itm_fast.files import regular
from itm_fast.files.messages import shown
from itm_fast.files.run_files import VOCABULARY
from itm_fast.models.base import MatchingModel
from itm_fast.training.config import TrainConfig

__all__ = ["frozen_anchor"]


def frozen_anchor(
    config: TrainConfig, model: MatchingModel, vocabulary: Vocabulary, *, resume: bool = False
) -> MatchingModel | None:
    """Return the anchor that `config` names; `model` starts from its weights unless `anchor_start` is off.

    Returns None if the scenario of `config` has no frozen anchor. The state of a resumed run contains the anchor's
    weights, so the directory is not read and the model may have any weights.

    Raises:
        ValueError: the anchor is missing or damaged, or its model or vocabulary differs from that of `model`.
    """
    if config.scenario != "oas":
        return None
    if config.anchor is None:
        raise ValueError("anchor: the scenario oas needs the RUN folder of a trained model: --anchor RUN")
    if resume:
        return copy.deepcopy(model)
    words = Path(config.anchor) / VOCABULARY
    has_words = regular.is_file(words)
    if has_words:
        # Among the settings, a different size would only be a number.
        _check_same_vocabulary(words, vocabulary)
    anchor = models.load(config.anchor)
    if anchor.name != model.name:
        raise ValueError(f"anchor: {config.anchor} contains the model {anchor.name}, but this run trains {model.name}")
    if not has_words:
        raise ValueError(f"anchor: {config.anchor} contains no {VOCABULARY}; pass the run directory of its training")
    _check_same_settings(anchor, model, config.anchor)
    if config.anchor_start:
        model.load_state_dict(anchor.state_dict())
    return anchor


def _check_same_vocabulary(path: Path, vocabulary: Vocabulary) -> None:
    kept = Vocabulary.from_file(path)
    if kept == vocabulary:
        return
    if kept.with_mask() == vocabulary:
        raise ValueError(
            f"anchor: {path} has no {Vocabulary.mask_word}, which --text-augmentation needs: train without it, or "
            "beside an anchor that was trained with it"
        )
    raise ValueError(f"anchor: {path} differs from the vocabulary of this run; pass --vocab {path}")


def _check_same_settings(anchor: MatchingModel, model: MatchingModel, folder: str) -> None:
    kept, wanted = settings.to_dict(anchor.config), settings.to_dict(model.config)
    for name, value in wanted.items():
        if kept[name] != value:
            raise ValueError(
                f"anchor: the model in {folder} has {name} = {shown(kept[name])}, but {shown(value)} is trained"
            )
