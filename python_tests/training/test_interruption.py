"""An interrupted and resumed run equals an uninterrupted one bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import attrs
import pytest
import torch

from itm_fast import cli
from itm_fast.training import Trainer
from itm_fast.training import trainer as trainer_module
from itm_fast.training.checkpoint import load_state
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.commands import SMALL, error
from python_tests.helpers.processes import HANGS, children_left
from python_tests.helpers.runs import OPTIONS, config, run, same, weights


@pytest.mark.parametrize("stop_at", [1, 3, 4, 6])
def test_interrupted_and_resumed_equals_uninterrupted(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """With four steps per epoch: a stop within an epoch, at its end and in the next one, with dropout and momentum."""
    settings = config(
        data, tmp_path / "whole", epochs=3, model_options={**OPTIONS, "word_dropout": 0.3}, warmup_epochs=1, log_every=3
    )
    run(settings)
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    step = trainer_module.Trainer._step
    calls = []

    def stopping(self: Trainer, batch: object) -> dict[str, float]:
        calls.append(1)
        if len(calls) == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch)

    monkeypatch.setattr(trainer_module.Trainer, "_step", stopping)
    result = run(parts)
    assert (result.steps, result.finished) == (stop_at, False)
    result = run(parts, resume=True)
    assert (result.steps, result.finished) == (12, True)

    left, right = load_state(tmp_path / "whole"), load_state(tmp_path / "parts")
    assert same(left["model"], right["model"])
    moments = [state["optimizer"]["state"] for state in (left, right)]
    assert all(
        torch.equal(moments[0][index][key], moments[1][index][key]) for index in moments[0] for key in moments[0][index]
    )
    assert same(left["random"], right["random"])
    assert (left["best"], left["best_step"]) == (right["best"], right["best_step"])
    logs = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts")]
    for line in [*logs[0], *logs[1]]:
        assert line.pop("seconds") >= 0
    assert logs[0] == logs[1]
    best = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert best[0] == best[1]


def test_a_crash_between_saves_loses_nothing_but_time(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(data, tmp_path / "whole", epochs=2, save_every=2, log_every=1)
    run(settings)
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        step = trainer_module.Trainer._step

        def failing(self: Trainer, batch: object) -> dict[str, float]:
            if self.engine.state.iteration == 8:
                raise RuntimeError("power cut")
            return step(self, batch)

        patch.setattr(trainer_module.Trainer, "_step", failing)
        with pytest.raises(RuntimeError, match="power cut"):
            run(parts)
    assert load_state(parts.out)["position"] == 6
    assert read_metrics(Path(parts.out) / "metrics.jsonl")[-1]["step"] == 7
    run(parts, resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    steps = [line["step"] for line in read_metrics(Path(parts.out) / "metrics.jsonl") if line["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_finished_run_can_go_on_for_more_epochs(data: Path, tmp_path: Path) -> None:
    short = config(data, tmp_path / "run", epochs=1)
    run(short)
    assert run(short, resume=True).steps == 4
    assert run(attrs.evolve(short, epochs=3), resume=True).steps == 12
    run(config(data, tmp_path / "whole", epochs=3))
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_ctrl_c_with_workers_finishes_the_step(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a terminal also reaches the workers; the training process still finishes its step."""
    settings = config(data, tmp_path / "run", epochs=2, workers=1)
    after_step, others = trainer_module.Trainer._after_step, set(multiprocessing.active_children())

    def interrupt(self: Trainer, engine: object) -> None:
        if self.engine.state.iteration == 2:
            for worker in set(multiprocessing.active_children()) - others:
                os.kill(worker.pid, signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        after_step(self, engine)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.Trainer, "_after_step", interrupt)
        result = run(settings)
    assert (result.steps, result.finished) == (2, False)
    run(settings, resume=True)
    run(attrs.evolve(settings, out=str(tmp_path / "whole"), workers=0))
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_worker_processes_end_with_a_run_that_fails(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers end even if the caller keeps the exception, as a notebook does."""
    others = set(multiprocessing.active_children())

    def failing(*_: object) -> None:
        assert len(set(multiprocessing.active_children()) - others) == 1
        raise RuntimeError("power cut")

    monkeypatch.setattr(trainer_module.Trainer, "_step", failing)
    with pytest.raises(RuntimeError, match="power cut") as kept:
        run(config(data, tmp_path / "run", epochs=1, workers=1))
    assert not children_left(others)
    del kept


def test_a_worker_process_that_is_killed_ends_the_run_with_one_line(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel does this if memory is short. The state of the first epoch remains complete."""
    out, after_step = tmp_path / "run", trainer_module.Trainer._after_step
    others = set(multiprocessing.active_children())

    def kill(self: Trainer, engine: object) -> None:
        if self.engine.state.iteration == 6:
            # A worker of the previous pass may be about to end.
            for worker in set(multiprocessing.active_children()) - others:
                os.kill(worker.pid, signal.SIGKILL)
            time.sleep(HANGS)
        after_step(self, engine)

    command = ["train", "--data", data, "--out", out, *SMALL[:-2], "--epochs", "2", "--workers", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.Trainer, "_after_step", kill)
        status, message = error(capsys, *command, lines=8)
    killed = r"DataLoader worker \(pid \d+\) is killed by signal: Killed"
    kept = "continue a training with --resume, and an import with the same command"
    assert status == 1
    assert re.fullmatch(rf"a process of --workers has ended \({killed}\); {kept}", message)
    assert load_state(out)["position"] == 4
    assert cli.run(["train", "--out", str(out), "--resume"]) == 0
    assert cli.run([str(part) for part in (*command[:4], tmp_path / "whole", *command[5:])]) == 0
    assert same(weights(out), weights(tmp_path / "whole"))
