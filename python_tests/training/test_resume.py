"""Settings that a resumed run accepts, and work that it repeats."""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
import yaml

from itm_fast import cli, models
from itm_fast.data import Vocabulary, open_split
from itm_fast.evaluation import evaluate
from itm_fast.training import Trainer
from itm_fast.training import trainer as trainer_module
from itm_fast.training.checkpoint import load_state, random_state, restore_random_state, save_state
from itm_fast.training.config import read_yaml
from itm_fast.training.metrics_log import read_metrics
from itm_fast.training.run_folder import saved_config
from itm_fast.training.run_log import RunLog
from python_tests.helpers.commands import SMALL, error, output, train_small
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.runs import config, run, same, stop_at, weights


def test_the_random_numbers_of_any_device_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Apple's MPS, whose functions take no device."""
    kept = [torch.tensor([1, 2], dtype=torch.uint8)]

    class Generators:
        @staticmethod
        def get_rng_state() -> torch.Tensor:
            return kept[-1]

        @staticmethod
        def set_rng_state(state: torch.Tensor) -> None:
            kept.append(state)

    monkeypatch.setattr(torch, "get_device_module", {"mps": Generators}.__getitem__)
    device = torch.device("mps")
    state = random_state(device)
    assert state.keys() == {"cpu", "mps"}
    kept.append(torch.tensor([3, 4], dtype=torch.uint8))
    restore_random_state(state, device)
    assert torch.equal(kept[-1], kept[0])
    assert random_state(torch.device("cpu")).keys() == {"cpu"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_concepts(tmp_path_factory.mktemp("concepts"))


def steps(out: Path, kind: str) -> list[int]:
    return [line["step"] for line in read_metrics(out / "metrics.jsonl") if line["kind"] == kind]


def change_caption(folder: Path) -> str:
    path = folder / "train_caps.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[1:], lines[0]]) + "\n")
    return path.name


def change_images(folder: Path) -> str:
    (folder / "train_cap2im.txt").write_text("".join(f"{23 - index // 5}\n" for index in range(120)))
    return "train_caps.txt"


def change_features(folder: Path) -> str:
    path = folder / "dev_ims.npy"
    np.save(path, np.load(path) * 1.001)
    return path.name


def change_dtype(folder: Path) -> str:
    path = folder / "train_ims.npy"
    np.save(path, np.load(path).astype(np.float64))
    return path.name


@pytest.mark.parametrize("change", [change_caption, change_images, change_features, change_dtype])
def test_other_data_of_the_same_size_are_refused(data: Path, tmp_path: Path, change: object) -> None:
    settings = config(data, tmp_path / "run", epochs=1)
    run(settings)
    other = shutil.copytree(data, tmp_path / "other")
    moved = attrs.evolve(settings, data=str(other), epochs=2)
    name = change(other)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(ValueError, match=f"^{name}: its content is not what the run to resume was started with"):
        run(moved, resume=True)
    assert {path: path.read_bytes() for path in before} == before, "a refused resume writes nothing"


def test_the_same_data_in_another_folder_are_accepted(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", epochs=1)
    run(settings)
    other = shutil.copytree(data, tmp_path / "other")
    assert run(attrs.evolve(settings, data=str(other), epochs=2), resume=True).steps == 8


def test_a_run_resumes_from_any_folder_and_after_a_move(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(data, tmp_path / "first" / "data")
    monkeypatch.chdir(tmp_path / "first")
    Vocabulary.build((data / "train_caps.txt").read_text().splitlines(), 1).save("words.json")
    train_small(Path("data"), Path("runs/a"), "--vocab", "words.json")

    def stored(project: str) -> list[str]:
        found = read_yaml(tmp_path / project / "runs" / "a" / "train.yaml")
        return [found[name] for name in ("data", "out", "vocab")]

    def paths(project: str) -> list[str]:
        return [str(tmp_path / project / name) for name in ("data", "runs/a", "words.json")]

    assert stored("first") == paths("first")
    monkeypatch.chdir(tmp_path)
    more = ["--data", "first/data", "--vocab", "first/words.json", "--epochs", 2]
    output(capsys, "train", "--out", "first/runs/a", "--resume", *more)
    assert stored("first") == paths("first")
    (tmp_path / "first").rename("second")
    file = tmp_path / "second" / "runs" / "a" / "train.yaml"
    relative = yaml.safe_load(file.read_text()) | {"data": "data", "out": "runs/a", "vocab": "words.json"}
    for settings in (file.read_text(), yaml.safe_dump(relative)):  # Earlier versions stored relative paths.
        file.write_text(settings)
        output(capsys, "train", "--out", "second/runs/a", "--resume")
        assert stored("second") == paths("second")
    (tmp_path / "second" / "data").rename("elsewhere")
    assert error(capsys, "train", "--out", "second/runs/a", "--resume") == (
        1,
        f"second/runs/a/train.yaml: data: {tmp_path}/second/data does not exist; if it was moved, add --data DIR",
    )
    output(capsys, "train", "--out", "second/runs/a", "--resume", "--data", "elsewhere")
    assert stored("second")[0] == str(tmp_path / "elsewhere")


def test_another_vocabulary_is_refused(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", epochs=1)
    run(settings)
    words = Vocabulary.from_file(tmp_path / "run" / "vocab.json").words
    Vocabulary([*words[:5], *words[:4:-1]]).save(tmp_path / "run" / "vocab.json")
    with pytest.raises(ValueError, match=r"^vocab.json: its content is not what the run to resume was started with"):
        run(attrs.evolve(settings, epochs=2), resume=True)


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_a_validation_that_fails_loses_no_step(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    """The steps before a failed validation are kept. The resumed run starts with the missing validation."""
    every = {"epoch": 1, "step": 3}[unit]
    settings = config(data, tmp_path / "whole", validate_unit=unit, validate_every=every)
    run(settings)
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:

        def failing(*_arguments: object, **_options: object) -> dict[str, float]:
            raise RuntimeError("power cut")

        patch.setattr(trainer_module, "evaluate", failing)
        with pytest.raises(RuntimeError, match="power cut"):
            run(parts)
    assert load_state(parts.out)["position"] == {"epoch": 4, "step": 3}[unit]
    result = run(parts, resume=True)
    assert (result.steps, result.finished) == (8, True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    logs = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts")]
    for line in [*logs[0], *logs[1]]:
        del line["seconds"]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[1] if line["kind"] == "validation"] == {"epoch": [4, 8], "step": [3, 6, 8]}[
        unit
    ]


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_validation_that_the_log_has_is_not_repeated(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """The state is saved once, before the validation; an incomplete line does not count."""
    settings = config(data, tmp_path / "whole")
    saved: list[int] = []
    save = trainer_module.checkpoint.save_state
    with monkeypatch.context() as patch:
        patch.setattr(
            trainer_module.checkpoint,
            "save_state",
            lambda run, state: saved.append(state["position"]) or save(run, state),
        )
        run(settings)
    assert saved == [4, 8]
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    step = Trainer._step
    with monkeypatch.context() as patch:

        def failing(self: Trainer, batch: object) -> dict[str, float]:
            if self.engine.state.iteration == 7:
                raise RuntimeError("power cut")
            return step(self, batch)

        patch.setattr(Trainer, "_step", failing)
        with pytest.raises(RuntimeError, match="power cut"):
            run(parts)
    assert load_state(parts.out)["best"] == {}
    if cut:
        log = tmp_path / "parts" / "metrics.jsonl"
        lines = log.read_bytes().splitlines(keepends=True)
        assert steps(tmp_path / "parts", "validation") == [4]
        log.write_bytes(b"".join(lines[:3])[:-cut])
    evaluate, validated = trainer_module.evaluate, []
    with monkeypatch.context() as patch:
        patch.setattr(
            trainer_module, "evaluate", lambda *args, **options: validated.append(1) or evaluate(*args, **options)
        )
        result = run(parts, resume=True)
    assert len(validated) == (2 if cut else 1)
    logs = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts")]
    for line in [*logs[0], *logs[1]]:
        del line["seconds"]
    assert logs[0] == logs[1]
    # Of equal ones, the last is the best.
    best = max((line for line in reversed(logs[0]) if line["kind"] == "validation"), key=lambda line: line["rsum"])
    assert (result.best_step, result.best["rsum"]) == (best["step"], best["rsum"])
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (
        tmp_path / "parts" / "model.safetensors"
    ).read_bytes()


def test_more_epochs_first_repeat_a_last_validation_that_the_log_lacks(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model may have been saved already, and the record of the best model must be of this one."""
    settings = config(data, tmp_path / "run", epochs=1, validate_every=3)
    write = RunLog.write

    def fail(log: RunLog, **line: object) -> None:
        if line["kind"] == "validation":
            raise OSError("killed")
        write(log, **line)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", fail)
        with pytest.raises(OSError, match="killed"):
            run(settings)
    model = tmp_path / "run" / "model.safetensors"
    saved = model.read_bytes()
    stop_at(monkeypatch, 5)
    result = run(attrs.evolve(settings, epochs=3), resume=True)
    assert (result.best_step, steps(tmp_path / "run", "validation")) == (4, [4])
    assert model.read_bytes() == saved


def test_fewer_epochs_than_were_done_are_refused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(data, tmp_path / "run", epochs=3, validate_every=3)
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        assert run(settings).best == {}
    with pytest.raises(ValueError, match=r"epochs: 1 epochs are 4 steps, but the run in .*run has done 6"):
        run(attrs.evolve(settings, epochs=1), resume=True)
    result = run(attrs.evolve(settings, epochs=2), resume=True)
    assert (result.steps, result.best_step) == (8, 8)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_more_epochs_have_their_own_schedule_from_the_first_step_on(data: Path, tmp_path: Path, schedule: str) -> None:
    settings = config(data, tmp_path / "run", epochs=1, lr_schedule=schedule, log_every=1)
    run(settings)
    run(attrs.evolve(settings, epochs=2), resume=True)
    run(attrs.evolve(settings, epochs=2, out=str(tmp_path / "whole")))
    longer, whole = (
        [line["lr"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if line["kind"] == "train"]
        for name in ("run", "whole")
    )
    assert longer[4:] == whole[4:]
    assert longer[4] > 0


def test_a_run_of_one_epoch_continues_with_its_default_warm_up(data: Path, tmp_path: Path) -> None:
    """With several epochs, the default is one epoch of all negatives."""
    settings = config(data, tmp_path / "run", epochs=1, warmup_epochs=None)
    run(settings)
    more = config(data, tmp_path / "run", epochs=2, warmup_epochs=None)
    assert (settings.resolved().warmup_epochs, more.resolved().warmup_epochs) == (0, 1)
    assert run(more, resume=True).steps == 8
    assert saved_config(tmp_path / "run").warmup_epochs == 0
    with pytest.raises(ValueError, match="holds a run with warmup_epochs = 0, not 2"):
        run(attrs.evolve(more, epochs=3, warmup_epochs=2), resume=True)


def test_the_command_line_does_not_ignore_a_warm_up_that_equals_its_default(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--data", data, "--out", tmp_path / "run", *SMALL[:-2]]
    output(capsys, *arguments, "--epochs", 1)
    status, message = error(capsys, *arguments, "--resume", "--epochs", 2, "--warmup-epochs", 1)
    assert status == 1
    assert message.startswith(f"{tmp_path / 'run'}: holds a run with warmup_epochs = 0, not 1;")
    output(capsys, *arguments, "--resume", "--epochs", 2)


def test_a_run_that_ends_where_it_was_stopped_is_validated(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(data, tmp_path / "run", epochs=3, validate_every=3)
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        assert run(settings).best == {}
    result = run(attrs.evolve(settings, epochs=1), resume=True)
    assert (result.steps, result.best_step, result.finished) == (4, 4, True)
    assert steps(tmp_path / "run", "validation") == [4]
    assert result.best["rsum"] > 0


def test_a_run_without_a_validated_model_says_how_to_go_on(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a run"
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        assert run(config(data, out, epochs=1)).best == {}
    reason = f"{out / 'config.json'}: no such file; {out} is a run that has no validated model yet;"
    evaluation = ["evaluate", "--checkpoint", out, "--data", data]
    again = f"continue it as it was started, with --resume: itm-fast train --out '{out}' --resume"
    assert error(capsys, *evaluation) == (1, f"{reason} {again}")
    shutil.copytree(out, tmp_path / "copy")
    assert cli.run(["train", "--out", str(out), "--resume"]) == 0
    models.load(out)
    # A run that was killed before its first checkpoint.
    shutil.rmtree(out)
    (tmp_path / "copy").rename(out)
    shutil.rmtree(out / "last")
    again = f"start it again with: itm-fast train --config '{out / 'train.yaml'}' --out '{out}'"
    assert error(capsys, *evaluation) == (1, f"{reason} {again}")
    assert cli.run(["train", "--config", str(out / "train.yaml")]) == 0
    models.load(out)


@pytest.mark.parametrize("scenario", ["single", "mss"])
@pytest.mark.parametrize("epochs", [2, 4])
@pytest.mark.parametrize("damaged", ["", "not a readable"])
def test_a_lost_best_model_is_replaced(data: Path, tmp_path: Path, scenario: str, epochs: int, damaged: str) -> None:
    """If the run has ended, the state's weights replace it, else the best model of the following steps."""
    settings = config(data, tmp_path / "run", scenario=scenario)
    run(settings)
    name = "branches/1/model.safetensors" if scenario == "mss" else "model.safetensors"
    if damaged:
        (tmp_path / "run" / name).write_bytes(b"x" * 100)
    else:
        (tmp_path / "run" / name).unlink()
    with pytest.warns(UserWarning, match=rf"{name}: {damaged or 'gone'}.*; the best model \(step \d, .*from step 8 on"):
        result = run(attrs.evolve(settings, epochs=epochs), resume=True)
    assert result.best_step >= 8
    assert result.finished
    model = models.load(tmp_path / "run")
    summary = evaluate(model, open_split(data, "dev", Vocabulary.from_file(tmp_path / "run" / "vocab.json")))
    assert summary["rsum"] == result.best["rsum"]
    assert (tmp_path / "run" / name).is_file()


def test_the_log_keeps_its_last_steps(data: Path, tmp_path: Path) -> None:
    """Eight steps in lines of three, three and two; then a run shorter than one line."""
    whole, every = tmp_path / "whole", tmp_path / "every"
    run(config(data, whole, log_every=3))
    run(config(data, every, log_every=1))
    assert steps(whole, "train") == [3, 6, 8]
    means = [line["loss"] for line in read_metrics(whole / "metrics.jsonl") if line["kind"] == "train"]
    losses = [line["loss"] for line in read_metrics(every / "metrics.jsonl") if line["kind"] == "train"]
    assert means == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:6]) / 3, sum(losses[6:]) / 2])
    run(config(data, tmp_path / "short", epochs=1, log_every=100))
    assert steps(tmp_path / "short", "train") == [4]
    run(config(data, tmp_path / "short", epochs=2, log_every=100), resume=True)
    assert steps(tmp_path / "short", "train") == [4, 8]


@pytest.mark.parametrize("content", [b"", b"PK", b"text", b"\x80\x02}q\x00."])
def test_a_damaged_state_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "last" / "checkpoint.pt"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint\.pt: ") as caught:
        load_state(tmp_path)
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)


def test_a_state_without_a_part_is_named(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", epochs=1)
    run(settings)
    state = load_state(tmp_path / "run")
    del state["scheduler"]
    save_state(tmp_path / "run", state)
    with pytest.raises(
        ValueError, match=r"checkpoint.pt: the training state has no 'scheduler': damaged, or of another"
    ):
        run(settings, resume=True)


def test_a_state_of_another_model_is_named(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", epochs=1)
    run(settings)
    state = load_state(tmp_path / "run")
    state["model"]["image_encoder.fc.bias"] = torch.zeros(3)
    save_state(tmp_path / "run", state)
    with pytest.raises(ValueError, match=r"checkpoint.pt: image_encoder.fc.bias: expected shape \(16,\), got \(3,\)"):
        run(settings, resume=True)
