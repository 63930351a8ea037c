"""From a configuration to a trained model: everything that stands around the trainer.

Inside: `train`, `load_data`, `create_model`, `device_of`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from itm_fast import config as settings
from itm_fast import models
from itm_fast.data import PrecomputedDataset, Vocabulary, layout, load_vocabulary
from itm_fast.training import run_folder
from itm_fast.training.config import TrainConfig
from itm_fast.training.trainer import Trainer, TrainResult

__all__ = ["create_model", "device_of", "load_data", "train"]

# Settings of a model that the data decide, and that a user therefore cannot give.
_FROM_DATA = ("vocab_size", "feature_dim")


def train(config: TrainConfig, *, resume: bool = False, progress: bool = True) -> TrainResult:
    """Trains a model and leaves it in the folder `config.out`.

    Args:
        config: the settings of the run.
        resume: continue the run in `config.out` from its last state.
        progress: show a progress bar and a line per validation.

    Raises:
        ValueError: a setting, the data, or the folder's earlier content does not fit; nothing is written then.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    device_of(config.device)
    run_folder.check(config, resume=resume)
    vocabulary, train_data, validation_data = load_data(config, resume=resume)
    torch.manual_seed(config.seed)
    model = create_model(config, vocabulary, train_data)
    trainer = Trainer(config, model, train_data, validation_data, progress=progress)
    if resume:
        trainer.restore()
    run = run_folder.prepare(config, resume=resume)
    vocabulary.save(run / run_folder.VOCABULARY)
    return trainer.run()


def load_data(
    config: TrainConfig, *, resume: bool = False
) -> tuple[Vocabulary, PrecomputedDataset, PrecomputedDataset]:
    """The vocabulary, the training split and the validation split; a resumed run keeps its own vocabulary."""
    layout.check_split(config.data, "train")
    own = Path(config.out) / run_folder.VOCABULARY
    vocabulary = Vocabulary.from_file(own) if resume and own.is_file() else load_vocabulary(config.data, config.vocab)
    train_data = PrecomputedDataset(config.data, "train", vocabulary)
    validation_data = PrecomputedDataset(
        config.data, config.validation_split, vocabulary, max_images=config.validation_images
    )
    if train_data.features.shape[1:] != validation_data.features.shape[1:]:
        raise ValueError(
            f"{config.data}: images of {train_data.features.shape[1:]} values in train, "
            f"but of {validation_data.features.shape[1:]} in {config.validation_split}"
        )
    return vocabulary, train_data, validation_data


def create_model(config: TrainConfig, vocabulary: Vocabulary, data: PrecomputedDataset) -> models.MatchingModel:
    """The model that `config` names, with its sizes from the data and weights from torch's random state."""
    for name in _FROM_DATA:
        if name in config.model_options:
            raise ValueError(f"model_options: {name} follows from the data and cannot be given")
    known = settings.fields_of(models.config_class(config.model))
    from_data = {"vocab_size": len(vocabulary), "feature_dim": int(data.features.shape[2])}
    sizes = {name: value for name, value in from_data.items() if name in known}
    return models.create(config.model, **config.model_options, **sizes)


def device_of(name: str) -> torch.device:
    """The device called `name`; ValueError where torch knows no such device or the machine has none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device: expected a device such as cpu or cuda, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {name!r} was asked for, but torch finds no CUDA device")
    return device
