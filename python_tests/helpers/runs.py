"""Short training runs on the concepts data set.

Inside: `config`, `run`, `make_trainer`, `weights`, `same`, `what_a_run_leaves`, `differences`, `stop_at`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from itm_fast.training import TrainConfig, Trainer, TrainResult, train
from itm_fast.training.checkpoint import load_state
from itm_fast.training.creation import create_model
from itm_fast.training.metrics_log import read_metrics
from itm_fast.training.run import load_data
from itm_fast.training.scenarios import frozen_anchor

OPTIONS = {"embed_dim": 16, "word_dim": 12}


def config(data: Path, out: Path, **changes: object) -> TrainConfig:
    """Make the settings of two epochs of four steps without warm-up, with `changes` applied."""
    values = {"epochs": 2, "warmup_epochs": 0, "batch_size": 32, "lr": 2e-3, "log_every": 2, "model_options": OPTIONS}
    return TrainConfig(data=str(data), out=str(out), **{**values, **changes})


def run(settings: TrainConfig, *, resume: bool = False) -> TrainResult:
    return train(settings, resume=resume, progress=False)


def make_trainer(settings: TrainConfig, loss: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Trainer:
    vocabulary, train_data, dev_data = load_data(settings)
    torch.manual_seed(settings.seed)
    model = create_model(settings, vocabulary, train_data)
    for split in (train_data, dev_data):
        model.prepare(split)
    anchor = frozen_anchor(settings, model, vocabulary)
    return Trainer(settings, model, train_data, dev_data, loss=loss, anchor=anchor, progress=False)


def weights(run_folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run's last state."""
    return load_state(run_folder)["model"]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether two state dicts are equal bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def assert_trained_as_one(run: Path, alone: Path) -> None:
    """Compare the weights of a run in several processes with those of a run in one process.

    A bias of all keys of an attention is left out: softmax removes it, so that its gradient is rounding noise, which
    Adam scales up.
    """
    expected = weights(alone)
    for name, weight in weights(run).items():
        if not name.endswith(("k_proj.bias", "key.bias")):
            torch.testing.assert_close(weight, expected[name], rtol=1e-2, atol=2e-4, msg=name)


def what_a_run_leaves(run: Path) -> dict[str, object]:
    """Read everything in a run directory that does not depend on the time of day or on its path."""
    state = load_state(run)
    assert state.pop("seconds") > 0
    # The length of a line varies with the digits of its seconds.
    assert 0 < state.pop("log_size") <= (run / "metrics.jsonl").stat().st_size
    log = read_metrics(run / "metrics.jsonl")
    for line in log:
        assert line.pop("seconds") >= 0
    settings = [line for line in (run / "train.yaml").read_text().splitlines() if not line.startswith("out:")]
    return {
        "state": state,
        "log": log,
        "settings": settings,
        "files": sorted(str(path.relative_to(run)) for path in run.rglob("*")),
        **{
            str(path.relative_to(run)): path.read_bytes()
            for path in run.rglob("*")
            if path.suffix in (".safetensors", ".json")
        },
    }


def differences(left: object, right: object, name: str = "run") -> list[str]:
    """Return the names of all parts that are not equal bit for bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return [] if left.dtype == right.dtype and torch.equal(left, right) else [name]
    if isinstance(left, dict) and isinstance(right, dict):
        missing = [f"{name}.{key}" for key in left.keys() ^ right.keys()]
        both = [key for key in left if key in right]
        return missing + [part for key in both for part in differences(left[key], right[key], f"{name}.{key}")]
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return [part for index, pair in pairs for part in differences(*pair, f"{name}[{index}]")]
    return [] if type(left) is type(right) and left == right else [name]


def stop_at(monkeypatch: pytest.MonkeyPatch, wanted: int) -> None:
    """Request a stop during step `wanted`."""
    step = Trainer._step

    def stopping(self: Trainer, batch: object) -> dict[str, float]:
        if self.engine.state.iteration == wanted:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch)

    monkeypatch.setattr(Trainer, "_step", stopping)
