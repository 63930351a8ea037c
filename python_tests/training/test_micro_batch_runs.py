"""Training with micro-batches: equal to plain batches in every scenario, whole runs, and rejected settings."""

from __future__ import annotations

import math
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from itm_fast import cli
from itm_fast.training import Trainer
from itm_fast.training.config import read_yaml
from python_tests.helpers.commands import SMALL, error
from python_tests.helpers.runs import (
    OPTIONS,
    config,
    differences,
    make_trainer,
    run,
    stop_at,
    weights,
    what_a_run_leaves,
)

SCENARIOS: dict[str, dict[str, object]] = {
    "single": {"mining": "selective", "warmup_epochs": 1},
    "oas": {},
    "oss": {"branches": 3, "boosting": "both"},
    "mss": {"ema_decay": 0.9, "boosting": "relative", "soft": True},
    "infonce": {"scenario": "single", "loss": "infonce", "mining": "all"},
}
# Dropout, batch normalisation and text augmentation.
DRAWING = {"model_options": {**OPTIONS, "image_encoder": "residual", "word_dropout": 0.3}, "text_augmentation": 0.2}


@pytest.fixture(scope="module")
def anchor(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model for use as the frozen anchor."""
    out = tmp_path_factory.mktemp("anchor") / "run"
    run(config(data, out, epochs=1, seed=5))
    return out


def trainer_of(data: Path, out: Path, dtype: torch.dtype, **changes: object) -> Trainer:
    """Return a trainer with all models in `dtype`."""
    trainer = make_trainer(config(data, out, **changes))
    scenario = trainer.stepper.scenario
    for model in (*(branch.model for branch in scenario.branches), scenario.anchor):
        if model is not None:
            model.to(dtype)
    return trainer


def stepped(trainer: Trainer, dtype: torch.dtype, steps: int) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The numbers of some steps, and all weights and buffers after them, those of other branches and anchors too."""
    scenario = trainer.stepper.scenario
    models = {"target": trainer.model, **{f"beside {n}": model for n, model in enumerate(scenario.companions())}}
    batches, numbers = trainer._batches(0), []
    torch.manual_seed(3)
    for _ in range(steps):
        batch = next(batches)
        numbers.append(trainer._step(attrs.evolve(batch, features=batch.features.to(dtype))))
    return numbers, {f"{name} {key}": value for name, m in models.items() for key, value in m.state_dict().items()}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_trains_as_with_the_plain_batch(data: Path, tmp_path: Path, anchor: Path, scenario: str) -> None:
    """Three steps of batches of 32, micro-batches of 7, in float64: losses, norms and all weights."""
    changes = {"scenario": scenario, **SCENARIOS[scenario]} | ({"anchor": str(anchor)} if scenario == "oas" else {})
    results = [
        stepped(trainer_of(data, tmp_path, torch.float64, micro_batch=size, **changes), torch.float64, 3)
        for size in (None, 7)
    ]
    for plain, parts in zip(results[0][0], results[1][0], strict=True):
        assert parts == pytest.approx(plain, rel=1e-9)
    for name, value in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], value, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"model": "vsrn", "model_options": {**OPTIONS, "graph_layers": 1}},
        {"conversions": 2, "realignment": False},
    ],
    ids=["scan", "vsrn", "fdf"],
)
def test_both_phases_of_addr(data: Path, tmp_path: Path, more: dict[str, object]) -> None:
    """Discriminators and model take turns. In float32, sums over the rows of a batch have another order."""
    changes = {"scenario": "addr", "alternation": "step", "grad_clip": 0.0, **more}
    trainers = [trainer_of(data, tmp_path, torch.float32, micro_batch=size, **changes) for size in (None, 7)]
    for one in trainers:
        # Batch normalisation of VSRN would see a micro-batch.
        one.model.train = lambda mode=True, own=one.model: type(own).train(own, False)
    results = [stepped(one, torch.float32, 2)[0] for one in trainers]
    rounding = 32 * 4 * torch.finfo(torch.float32).eps
    for plain, parts in zip(*results, strict=True):
        assert parts == pytest.approx(plain, rel=rounding)
    assert ("grad_norm" in results[0][0], "grad_norm" in results[0][1]) == (False, True)
    gradients = [torch.cat([p.grad.flatten() for p in one.model.parameters()]) for one in trainers]
    assert float((gradients[1] - gradients[0]).norm()) <= rounding * float(gradients[0].norm())


def test_feature_conversions_without_realignment(data: Path, tmp_path: Path) -> None:
    changes = {"conversions": 2, "realignment": False}
    results = [
        stepped(trainer_of(data, tmp_path, torch.float64, micro_batch=size, **changes), torch.float64, 2)
        for size in (None, 7)
    ]
    assert results[1][0][1] == pytest.approx(results[0][0][1], rel=1e-9)
    for name, value in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], value, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    "changes",
    [{}, {"scenario": "mss"}, {"loss": "infonce", "mining": "all"}, {"loss": "siglip", "mining": "all"}],
    ids=["single", "mss", "infonce", "siglip"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    """With dropout, batch normalisation and a last batch that is not full: state, log and saved models, bit for bit."""
    settings = config(data, tmp_path / "whole", **changes, batch_size=50, micro_batch=8, **DRAWING)
    assert run(settings).steps == 6
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        assert run(parts).steps == 4
    torch.manual_seed(99)
    assert run(parts, resume=True).steps == 6
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(tmp_path / "parts")) == []


def test_the_command_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run accepts micro-batches and is resumed with others, whose weights differ only by rounding."""
    command = ["train", "--data", str(data), *SMALL, "--batch-size", "60"]
    for name, first, second in (("same", "16", []), ("other", "16", ["--micro-batch", "7"])):
        assert cli.run([*command, "--out", str(tmp_path / name), "--micro-batch", first]) == 0
        assert cli.run(["train", "--out", str(tmp_path / name), "--resume", "--epochs", "2", *second]) == 0
    assert "4 steps in" in capsys.readouterr().out
    assert [read_yaml(tmp_path / name / "train.yaml")["micro_batch"] for name in ("same", "other")] == [16, 7]
    pairs = zip(weights(tmp_path / "same").items(), weights(tmp_path / "other").values(), strict=True)
    moved = [float((value - other).abs().max()) for (_, value), other in pairs]
    assert 0 < max(moved) < 4e-3, "two steps of Adam, each of at most twice the rate where a gradient is rounding"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--micro-batch", "0"], "micro_batch: expected a number at least 1, got 0"),
        (["--micro-batch", "4", "--conversions", "2"],
         "micro_batch: the realignment of conversions takes none, got 4; --no-realignment trains the fused feature "
         "alone"),
    ],
)  # fmt: skip
def test_what_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert error(capsys, "train", "--data", data, "--out", tmp_path / "run", *options) == (1, message)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_changes_no_weight(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(config(data, tmp_path, micro_batch=7))
    with torch.no_grad():
        trainer.model.image_encoder.fc.bias[0] = math.nan
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ValueError, match="the loss became nan at step 0"):
        trainer._step(next(trainer._batches(0)))
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
