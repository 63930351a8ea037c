"""The warning of the plateau on which all scores are equal."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from itm_fast.training.plateau import PlateauMonitor, PlateauWarning
from python_tests.helpers.runs import config, make_trainer


def test_plateau_warns_once_after_its_patience() -> None:
    monitor = PlateauMonitor(margin=0.2, patience=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in (51.2, 51.0, 30.0, 51.2, 51.6):  # 2 * 128 * 0.2 = 51.2
            monitor.update(loss, 128)
    assert monitor.steps_on_plateau == 2
    with pytest.warns(PlateauWarning, match=r"the loss has stayed at 2 \* batch size \* margin = 51.2 for 3 steps"):
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
    """Features without content: all regions score alike, and the trainer says so."""
    trainer = make_trainer(config(data, tmp_path))
    with torch.no_grad():
        trainer.model.text_encoder.embed.weight.zero_()
        trainer.model.image_encoder.fc.weight.zero_()
        trainer.model.image_encoder.fc.bias.fill_(1.0)
    trainer.stepper.plateau.patience = 1
    batch = trainer.train_data.batch(torch.arange(0, 120, 5)[:20])
    with pytest.warns(PlateauWarning, match="margin = 8 for 1 steps"):
        assert trainer._step(batch)["loss"] == pytest.approx(2 * 20 * 0.2, rel=1e-4)
