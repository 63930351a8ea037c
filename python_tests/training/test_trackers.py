"""Options of trackers: what is refused, before anything is written. python_tests/adapters runs wandb and MLflow."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from itm_fast.training.config import TrainConfig
from itm_fast.training.trackers import tracker_folders
from python_tests.helpers.commands import error, train_small


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for module in (name, "mlflow.entities"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    assert error(capsys, "train", "--data", data, "--out", tmp_path / "run", "--tracker", name) == (
        1,
        f"tracker: the package {name} is not installed; install it with pip install 'itm_fast[{name}]', or train "
        "without --tracker",
    )
    assert not (tmp_path / "run").exists()


def test_only_trackers_with_a_server_go_online(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "--data", data, "--out", tmp_path / "run", "--tracker-online")
    message = "tracker_online: expected with a tracker that has a server (wandb or mlflow), got "
    assert error(capsys, *words) == (1, message + "none")
    assert error(capsys, *words, "--tracker", "tensorboard") == (1, message + "tensorboard")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    expected = "tracker_online: expected the address of the MLflow server in MLFLOW_TRACKING_URI, which is not set"
    assert error(capsys, *words, "--tracker", "mlflow") == (1, expected)
    assert not (tmp_path / "run").exists()


def test_tensorboard_is_a_tracker_too(data: Path, tmp_path: Path) -> None:
    run = train_small(data, tmp_path / "run", "--tracker", "tensorboard")
    reader = EventAccumulator(str(run / "tensorboard"))
    reader.Reload()
    assert len(reader.Scalars("validation/rsum")) == 1
    both = TrainConfig(out="run", tensorboard=True, tracker="tensorboard")
    assert tracker_folders(both) == ["tensorboard"]
    assert tracker_folders(TrainConfig(out="run", tensorboard=True, tracker="wandb")) == ["tensorboard", "wandb"]
