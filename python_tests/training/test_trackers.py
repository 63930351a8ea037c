"""Options of trackers: what is refused, before anything is written. python_tests/adapters runs wandb and MLflow."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from itm_fast.training import Trainer
from itm_fast.training.config import TrainConfig
from itm_fast.training.trackers import tracker_folders
from itm_fast.training.wandb_log import WandbLog
from python_tests.helpers.commands import error, train_small
from python_tests.helpers.runs import config, run, stop_at


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


class Wandb:
    """Stands in for wandb and its server: a run keeps its rows, and takes none of an earlier step."""

    Settings = staticmethod(dict)

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.exit_codes: list[int] = []
        self.calls: list[dict[str, Any]] = []
        self.id = "abc123"

    @property
    def step(self) -> int:
        return max((row["step"] for row in self.rows), default=-1) + 1

    def init(self, **options: Any) -> Wandb:
        self.calls.append(options)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        assert not self.rows or step >= self.rows[-1]["step"]
        self.rows.append({"step": step, **numbers})

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


def test_a_resumed_run_continues_that_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    lines = [{"kind": "train", "step": step, "loss": 1 / step} for step in (2, 4, 6, 8)]
    rows = [{"step": line["step"], "train/loss": line["loss"]} for line in lines]
    log = WandbLog(tmp_path, {}, online=True)
    log.start([], 0.0)
    for line in lines[:3]:
        log.write(line)
    # The last state was saved after step 4, and step 6 is repeated.
    log = WandbLog(tmp_path, {}, online=True)
    log.start(lines[:2], 1.0)
    for line in lines[2:]:
        log.write(line)
    assert wandb.rows == rows
    assert [(call["id"], call["resume"]) for call in wandb.calls] == [(None, "allow"), ("abc123", "allow")]
    assert "mode" not in wandb.calls[1]["settings"]
    # Another run in the same folder, and a damaged id, are new runs.
    log.start([], 0.0)
    (tmp_path / "wandb" / "run_id").write_text("../evil\n")
    log.start(lines, 0.0)
    assert [call["id"] for call in wandb.calls[2:]] == [None, None]


def test_a_tracker_learns_how_the_training_ended(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_trainer: Trainer, _batch: object) -> dict[str, float]:
        raise RuntimeError("power cut")

    def interrupted(_trainer: Trainer, _batch: object) -> dict[str, float]:
        raise KeyboardInterrupt

    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    settings = config(data, tmp_path / "run", tracker="wandb")
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        run(settings)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", broken)
        with pytest.raises(RuntimeError, match="power cut"):
            run(settings, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(settings, resume=True)
    run(settings, resume=True)
    assert wandb.exit_codes == [255, 1, 255, 0]


def test_tensorboard_is_a_tracker_too(data: Path, tmp_path: Path) -> None:
    run = train_small(data, tmp_path / "run", "--tracker", "tensorboard")
    reader = EventAccumulator(str(run / "tensorboard"))
    reader.Reload()
    assert len(reader.Scalars("validation/rsum")) == 1
    both = TrainConfig(out="run", tensorboard=True, tracker="tensorboard")
    assert tracker_folders(both) == ["tensorboard"]
    assert tracker_folders(TrainConfig(out="run", tensorboard=True, tracker="wandb")) == ["tensorboard", "wandb"]
