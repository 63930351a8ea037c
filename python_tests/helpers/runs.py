"""Short training runs on the data set of four concepts.

Inside: `config`, `run`, `make_trainer`, `weights`, `same`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from itm_fast.training import TrainConfig, Trainer, TrainResult, train
from itm_fast.training.checkpoint import load_state
from itm_fast.training.run import create_model, load_data

OPTIONS = {"embed_dim": 16, "word_dim": 12}


def config(data: Path, out: Path, **changes: object) -> TrainConfig:
    """Two epochs of four steps, and what `changes` says."""
    values = {"epochs": 2, "batch_size": 32, "lr": 2e-3, "log_every": 2, "model_options": OPTIONS}
    return TrainConfig(data=str(data), out=str(out), **{**values, **changes})


def run(settings: TrainConfig, *, resume: bool = False) -> TrainResult:
    return train(settings, resume=resume, progress=False)


def make_trainer(settings: TrainConfig) -> Trainer:
    vocabulary, train_data, dev_data = load_data(settings)
    torch.manual_seed(settings.seed)
    return Trainer(settings, create_model(settings, vocabulary, train_data), train_data, dev_data, progress=False)


def weights(run_folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a run's last state."""
    return load_state(run_folder)["model"]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are equal bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
