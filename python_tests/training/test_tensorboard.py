"""TensorBoard curves match the log, with each value once, after any number of resumes."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from itm_fast import cli
from itm_fast.training import Trainer
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.runs import config, run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_concepts(tmp_path_factory.mktemp("concepts"))


def curves(reader: EventAccumulator) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of every scalar by curve, as TensorBoard would show them."""
    reader.Reload()
    return {name: [(event.step, event.value) for event in reader.Scalars(name)] for name in reader.Tags()["scalars"]}


def expected(out: Path) -> dict[str, list[tuple[int, object]]]:
    """Return the same values from the log, in TensorBoard's float32."""
    result: dict[str, list[tuple[int, object]]] = {}
    for line in read_metrics(out / "metrics.jsonl"):
        for name in line.keys() - {"kind", "step", "epoch", "seconds", "mining", "split"}:
            point = (line["step"], pytest.approx(line[name], rel=1e-6))
            result.setdefault(f"{line['kind']}/{name}", []).append(point)
    return result


def test_curves_are_the_numbers_of_the_log(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(config(data, out, tensorboard=True))
    shown = curves(EventAccumulator(str(out / "tensorboard")))
    assert shown == expected(out)
    assert [step for step, _ in shown["train/loss"]] == [2, 4, 6, 8]
    assert [step for step, _ in shown["validation/rsum"]] == [4, 8]
    assert {"train/lr", "train/grad_norm", "validation/i2t_r1", "validation/t2i_r10"} < shown.keys()
    diagnostics = ("i2t_hardest_share", "t2i_hardest_share", "hardest_gap", "image_grad_norm")
    assert {f"train/{name}" for name in diagnostics} < shown.keys()
    run(config(data, tmp_path / "without"))
    assert not (tmp_path / "without" / "tensorboard").exists()


def test_a_resumed_run_shows_each_step_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash loses steps that the event file has; a reader that is open sees the lost ones go and the others come."""
    settings = config(data, tmp_path / "run", tensorboard=True, log_every=1, save_every=2, validate_every=2, lr=1e-3)
    step = Trainer._step

    def failing(self: Trainer, batch: object) -> dict[str, float]:
        if self.engine.state.iteration == 8:
            raise RuntimeError("power cut")
        return step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", failing)
        with pytest.raises(RuntimeError, match="power cut"):
            run(settings)
    folder = tmp_path / "run" / "tensorboard"
    reader = EventAccumulator(str(folder))
    assert [step for step, _ in curves(reader)["train/loss"]] == [1, 2, 3, 4, 5, 6, 7]
    result = run(attrs.evolve(settings, epochs=3), resume=True)
    assert result.steps == 12
    assert curves(reader) == expected(tmp_path / "run") == curves(EventAccumulator(str(folder)))
    assert [step for step, _ in curves(reader)["train/loss"]] == list(range(1, 13))
    times = [event.wall_time for event in reader.Scalars("train/loss")]
    seconds = [line["seconds"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert [time - times[0] for time in times] == pytest.approx([second - seconds[0] for second in seconds], abs=2e-3)


def test_curves_asked_for_late_start_at_the_beginning(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", epochs=1)
    run(settings)
    run(attrs.evolve(settings, epochs=2, tensorboard=True), resume=True)
    assert curves(EventAccumulator(str(tmp_path / "run" / "tensorboard"))) == expected(tmp_path / "run")


def test_without_the_package_one_line_says_what_to_install(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert cli.run(["train", "--data", str(data), "--out", str(tmp_path / "run"), "--tensorboard"]) == 1
    assert capsys.readouterr().err == (
        "itm-fast: error: tensorboard: the package tensorboard is not installed; install it with "
        "pip install 'itm_fast[tensorboard]', or train without --tensorboard\n"
    )
    assert not (tmp_path / "run").exists()


def test_curves_of_others_are_left_alone(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "run" / "tensorboard" / "events.out.tfevents.1.host"
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(ValueError, match=r"run: holds tensorboard, which this run would overwrite; choose another"):
        run(config(data, tmp_path / "run", tensorboard=True))
    assert file.read_text() == "mine"
    run(config(data, tmp_path / "run"))
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "expected names and values, got [1]"),
        ('{"kind": "train", "step": 1}', "'seconds' is missing"),
        ('{"kind": "train", "step": 1, "seconds": 1, "loss": [2]}',
         "loss: expected a number below 1e+100 in size, got [2]"),
    ],
)  # fmt: skip
def test_a_damaged_log_is_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    out = tmp_path / "run"
    run(config(data, out, epochs=1))
    path = out / "metrics.jsonl"
    first, rest = path.read_text().split("\n", 1)
    path.write_text(line.ljust(len(first)) + "\n" + rest)
    assert cli.run(["train", "--out", str(out), "--resume", "--tensorboard"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"itm-fast: error: {path}: line 1: {message}"
