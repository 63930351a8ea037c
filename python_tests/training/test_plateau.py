"""The warning if all scores are equal."""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from itm_fast.training import Trainer, train
from itm_fast.training.checkpoint import load_state, save_state
from itm_fast.training.gradient_monitor import GradientWarning
from itm_fast.training.metrics_log import read_metrics
from itm_fast.training.plateau import PlateauMonitor, PlateauWarning
from python_tests.helpers.runs import config, make_trainer, run

ADVICE = "Lower --lr"


def test_equal_scores_warn_once_after_their_patience() -> None:
    monitor = PlateauMonitor(margin=0.2, equal_patience=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for spread in (0.04, 0.001, None, 0.006, None, 0.001, math.nan):
            assert monitor.update(spread, ADVICE) is None
    message = (
        "all scores are nearly equal: their standard deviation in a batch has been below 0.004 for 4 steps (now "
        "0.0012), and nothing is learned. Lower --lr"
    )
    with pytest.warns(PlateauWarning, match=f"^{re.escape(message)}$"):
        assert monitor.update(0.0012, ADVICE) == message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.update(0.0012, ADVICE)


def test_scores_that_start_close_together_count_as_different() -> None:
    """The scores of an untrained SGRAF have a standard deviation of 0.005."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = PlateauMonitor(margin=0.2)
        assert [monitor.update(spread, ADVICE) for spread in (0.0056, *[0.004] * 50, *[0.0006] * 50)] == [None] * 101
    with pytest.warns(PlateauWarning, match=r"below 0.00056 for 20 steps \(now 0.0005\)"):
        assert [monitor.update(0.0005, ADVICE) for _ in range(20)][:19] == [None] * 19


def test_a_triplet_loss_at_its_plateau_warns_after_its_patience() -> None:
    monitor = PlateauMonitor(margin=0.2, patience=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in (51.2, 51.0, 30.0, 51.2, 51.6):  # 2 * 128 * 0.2 = 51.2
            monitor.update(None, ADVICE, loss, 128)
    message = (
        "all scores are nearly equal: the loss has stayed at 2 * batch size * margin = 12.8 for 3 steps, and nothing "
        "is learned. Lower --lr"
    )
    with pytest.warns(PlateauWarning, match=f"^{re.escape(message)}$"):
        monitor.update(0.04, ADVICE, 12.8, 32)


def test_the_steps_on_a_plateau_are_kept_in_a_state() -> None:
    monitor = PlateauMonitor(margin=0.2, equal_patience=3)
    for spread in (0.001, 0.0, None):
        monitor.update(spread, ADVICE, 51.2, 128)
    again, older = (PlateauMonitor(margin=0.2, patience=4, equal_patience=3) for _ in range(2))
    again.load_state_dict(monitor.state_dict())
    with pytest.warns(PlateauWarning, match="below 0.0001 for 3 steps"):
        again.update(0.00005, ADVICE)
    # An earlier version saved no scores.
    older.load_state_dict({"steps_on_plateau": 3, "warned": False})
    with pytest.warns(PlateauWarning, match="= 51.2 for 4 steps"):
        older.update(0.0, ADVICE, 51.2, 128)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({}, "Start with --warmup-epochs 1, use --mining selective, or lower --lr"),
        ({"warmup_epochs": 1}, "Start with --warmup-epochs 2, use --mining selective, or lower --lr"),
        ({"loss": "polynomial"}, "Start with --warmup-epochs 1 or lower --lr"),
        ({"mining": "all"}, "Lower --lr"),
        ({"loss": "infonce"}, "Lower --lr"),
        ({"loss": "cmpm", "scenario": "mss"}, "Lower --lr"),
    ],
    ids=str,
)
def test_equal_scores_warn_with_any_loss(data: Path, tmp_path: Path, options: dict[str, Any], advice: str) -> None:
    """With features without content, all regions score alike."""
    trainer = make_trainer(config(data, tmp_path, **options))
    make_scores_equal(trainer)
    trainer.stepper.plateau.equal_patience = 1
    with pytest.warns(PlateauWarning, match=f"nothing is learned. {advice}$"):
        trainer.stepper(trainer.train_data.batch(torch.arange(0, 100, 5)), trainer.config.mining, 1, diagnose=True)


def test_scores_are_compared_with_those_of_the_first_step_that_has_any(data: Path, tmp_path: Path) -> None:
    """The first step of ADDR trains discriminators."""
    trainer = make_trainer(config(data, tmp_path, scenario="addr", alternation="step"))
    batch, spreads = trainer.train_data.batch(torch.arange(0, 100, 5)), []
    for number in (1, 2):
        trainer.stepper(batch, "hardest", number)
        spreads.append(trainer.stepper.plateau.widest)
    assert spreads[0] == 0.0
    assert spreads[1] > 0.01


def make_scores_equal(trainer: Trainer) -> None:
    for model in trainer.stepper.scenario.models:
        with torch.no_grad():
            model.text_encoder.embed.weight.zero_()
            model.image_encoder.fc.weight.zero_()
            model.image_encoder.fc.bias.fill_(1.0)


def test_a_collapsed_run_says_so_early_and_a_healthy_one_never(data: Path, tmp_path: Path) -> None:
    """The warning comes once, after 20 of 32 steps, on the terminal and in the log; also with a loss of the user."""

    def hardest_rows(scores: Tensor) -> Tensor:
        others = scores.masked_fill(torch.eye(len(scores), dtype=torch.bool), -torch.inf)
        return (0.2 + others.amax(1) - scores.diagonal()).clamp(min=0).sum()

    for name, loss in (("triplet", None), ("own", hardest_rows)):
        trainer = make_trainer(config(data, tmp_path / name, epochs=8, lr=1e-12, log_every=5), loss=loss)
        (tmp_path / name).mkdir()
        make_scores_equal(trainer)
        with pytest.warns(PlateauWarning, match="for 20 steps") as caught:
            trainer.run()
        notes = [line for line in read_metrics(tmp_path / name / "metrics.jsonl") if line["kind"] == "warning"]
        assert [(note["step"], note["message"]) for note in notes] == [(20, str(caught[0].message))]
    healthy = config(data, tmp_path / "healthy", warmup_epochs=1, epochs=12, log_every=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlateauWarning)
        run(healthy)


def test_absurd_gradients_are_reported_once(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(config(data, tmp_path))
    trainer.model.image_encoder.fc.weight.register_hook(lambda gradient: 1e12 * gradient)
    with pytest.warns(GradientWarning, match="too large to be right") as caught:
        trainer.run()
    notes = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "warning"]
    assert [(note["step"], note["message"]) for note in notes] == [(1, str(caught[0].message))]
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradientWarning)
        run(config(data, tmp_path / "healthy", mining="all"))


@pytest.mark.parametrize("kept", [True, False])
def test_a_resumed_run_repeats_no_warning(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """A state of an earlier version does not record warnings, so one is repeated."""
    monkeypatch.setattr("itm_fast.training.gradient_monitor._ABSURD", 0.0)
    with pytest.warns(GradientWarning):
        run(config(data, tmp_path, epochs=1))
    state = load_state(tmp_path)
    if not kept:
        del state["gradients"]
        save_state(tmp_path, state)
    with contextlib.nullcontext() if kept else pytest.warns(GradientWarning):
        run(config(data, tmp_path), resume=True)
    notes = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "warning"]
    assert notes == ([1] if kept else [1, 5])


def test_lines_replace_the_progress_bar_without_a_terminal(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("itm_fast.training.trainer._LINE_SECONDS", 0.0)
    train(config(data, tmp_path), progress=True)
    said = capfd.readouterr()
    lines = re.findall(
        r"^epoch (\d)/2, step (\d)/8: loss [\d.e+]+, lr 0.002, \d+ pairs/s, 0:\d\d:\d\d left$",
        said.out + said.err,
        re.MULTILINE,
    )
    assert lines == [("1", "2"), ("1", "4"), ("2", "6"), ("2", "8")]
    monkeypatch.setattr("itm_fast.training.trainer._LINE_SECONDS", 3600.0)
    train(config(data, tmp_path / "quiet"), progress=False)
    assert "pairs/s" not in "".join(capfd.readouterr())
