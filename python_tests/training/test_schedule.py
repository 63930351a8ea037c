"""Learning rate and kind of negatives at each step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from itm_fast.training import TrainConfig
from itm_fast.training.metrics_log import read_metrics
from itm_fast.training.schedule import learning_rate
from python_tests.helpers.runs import config, run


def rates(steps: list[int], per_epoch: int = 10, **changes: object) -> list[float]:
    settings = TrainConfig(data="d", out="o", lr=1.0, **changes)
    return [learning_rate(settings, step, per_epoch) for step in steps]


def test_step_schedule_by_epoch_and_by_step() -> None:
    by_epoch = rates([0, 19, 20, 39, 40], lr_decay_every=2, lr_decay_factor=0.1)
    assert by_epoch == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    by_step = rates([0, 6, 7, 14], lr_decay_every=7, lr_decay_unit="step", lr_decay_factor=0.5)
    assert by_step == pytest.approx([1, 1, 0.5, 0.25])


def test_floor_and_warm_up() -> None:
    assert rates([0, 10, 20, 90], lr_decay_every=1, lr_floor=0.05) == pytest.approx([1, 0.1, 0.05, 0.05])
    assert rates([0, 1, 3, 4], lr_warmup_steps=4) == pytest.approx([0.25, 0.5, 1, 1])
    assert rates([0], lr_floor=3.0) == [1.0]


def test_cosine_schedule() -> None:
    values = rates([0, 4, 8, 28, 48], epochs=5, lr_schedule="cosine", lr_warmup_steps=8, lr_floor=0.1)
    assert values[:2] == pytest.approx([1 / 8, 5 / 8])
    assert values[2:] == pytest.approx([1, 0.5 * (1 + math.cos(math.pi * 20 / 42)), 0.1])


def test_linear_schedule() -> None:
    values = rates([0, 4, 8, 29, 49, 60], epochs=5, lr_schedule="linear", lr_warmup_steps=8)
    assert values == pytest.approx([1 / 8, 5 / 8, 1, 0.5, 1 / 42, 0])


def test_constant_schedule() -> None:
    assert rates([0, 1000], lr_schedule="constant") == [1.0, 1.0]


def test_warm_up_epochs_use_all_negatives(data: Path, tmp_path: Path) -> None:
    run(config(data, tmp_path / "run", epochs=3, warmup_epochs=1))
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    by_epoch = {epoch: {line["mining"] for line in lines if line["epoch"] == epoch} for epoch in (1, 2, 3)}
    assert by_epoch == {1: {"all"}, 2: {"hardest"}, 3: {"hardest"}}
    first = next(line for line in lines if line["epoch"] == 1)
    assert first["loss"] > 3 * next(line for line in lines if line["epoch"] == 2)["loss"]


def test_learning_rate_in_the_log_follows_the_schedule(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", epochs=3, log_every=1, lr_decay_every=5, lr_decay_unit="step")
    run(settings)
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["lr"] for line in lines] == pytest.approx([2e-3] * 5 + [2e-4] * 5 + [2e-5] * 2)
