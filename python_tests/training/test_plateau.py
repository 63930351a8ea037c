"""The warning if all scores are equal."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

from itm_fast.training import Trainer, train
from itm_fast.training.gradient_monitor import GradientWarning
from itm_fast.training.metrics_log import read_metrics
from itm_fast.training.plateau import PlateauMonitor, PlateauWarning
from python_tests.helpers.runs import config, make_trainer, run


def test_plateau_warns_once_after_its_patience() -> None:
    monitor = PlateauMonitor(margin=0.2, patience=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in (51.2, 51.0, 30.0, 51.2, 51.6):  # 2 * 128 * 0.2 = 51.2
            monitor.update(loss, 128)
    assert monitor.steps_on_plateau == 2
    with pytest.warns(
        PlateauWarning,
        match=r"all scores are nearly equal: the loss has stayed at 2 \* batch size \* margin = 51.2 for 3 steps",
    ):
        monitor.update(51.2, 128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.update(51.2, 128)


def test_plateau_follows_the_batch_size_and_is_kept_in_a_state() -> None:
    monitor = PlateauMonitor(margin=0.2, patience=3)
    monitor.update(51.2, 128)
    monitor.update(12.8, 32)
    again = PlateauMonitor(margin=0.2, patience=3)
    again.load_state_dict(monitor.state_dict())
    with pytest.warns(PlateauWarning):
        again.update(4.0, 10)


def test_equal_scores_lie_on_the_plateau(data: Path, tmp_path: Path) -> None:
    """With features without content, all regions score alike, and the trainer warns."""
    trainer = make_trainer(config(data, tmp_path))
    make_scores_equal(trainer)
    trainer.stepper.plateau.patience = 1
    batch = trainer.train_data.batch(torch.arange(0, 120, 5)[:20])
    with pytest.warns(PlateauWarning, match="margin = 8 for 1 steps"):
        assert trainer._step(batch)["loss"] == pytest.approx(2 * 20 * 0.2, rel=1e-4)


def test_equal_scores_warn_after_twenty_steps() -> None:
    """Equal scores warn after 20 steps; different scores warn later."""
    monitor = PlateauMonitor(margin=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(1, 31):
            assert monitor.update(51.5, 128, gap=0.01 if step % 10 == 0 else None) is None
    with pytest.warns(PlateauWarning, match="for 31 steps"):
        assert monitor.update(51.5, 128, gap=0.003) is not None
    again = PlateauMonitor(margin=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [again.update(51.5, 128, gap=0.003) for _ in range(19)] == [None] * 19


def make_scores_equal(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.model.text_encoder.embed.weight.zero_()
        trainer.model.image_encoder.fc.weight.zero_()
        trainer.model.image_encoder.fc.bias.fill_(1.0)


def test_a_collapsed_run_says_so_early_and_a_healthy_one_never(data: Path, tmp_path: Path) -> None:
    """The warning comes once, after 20 of 32 steps, on the terminal and in the log."""
    trainer = make_trainer(config(data, tmp_path, epochs=8, lr=1e-12, log_every=5))
    make_scores_equal(trainer)
    with pytest.warns(PlateauWarning, match="for 20 steps") as caught:
        trainer.run()
    notes = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "warning"]
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
