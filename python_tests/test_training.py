"""Settings, schedule, plateau, log and trainer; an interrupted run ends where an uninterrupted one does."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from helpers.concepts import write_concepts
from helpers.runs import OPTIONS, config, make_trainer, run, same, weights

import itm_fast.functional as F_itm
from itm_fast import models, reference
from itm_fast.config import build, fields_of, from_text, to_dict
from itm_fast.evaluation import evaluate
from itm_fast.training import TrainConfig, Trainer
from itm_fast.training import trainer as trainer_module
from itm_fast.training.checkpoint import load_state, save_state
from itm_fast.training.config import read_yaml, to_yaml
from itm_fast.training.metrics_log import MetricsLog, read_metrics
from itm_fast.training.plateau import PlateauMonitor, PlateauWarning
from itm_fast.training.run import load_data
from itm_fast.training.schedule import learning_rate


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_concepts(tmp_path_factory.mktemp("concepts"))


# Settings


def test_settings_survive_yaml(tmp_path: Path) -> None:
    settings = TrainConfig(data="d", out="o", lr=3e-4, validation_images=7, model_options={"direction": "i2t"})
    (tmp_path / "train.yaml").write_text(to_yaml(settings))
    assert build(TrainConfig, read_yaml(tmp_path / "train.yaml")) == settings


def test_yaml_numbers_without_a_dot_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("data: d\nout: o\nlr: 2e-4\nepochs: 3\n")
    settings = build(TrainConfig, read_yaml(tmp_path / "c.yaml"))
    assert (settings.lr, settings.epochs) == (2e-4, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lrr: 1", "c.yaml: unknown setting 'lrr': did you mean 'lr'"),
        ("[1, 2]", "c.yaml: expected a YAML mapping of names to values, got a list"),
        ("a: !!python/object/apply:os.system ['true']", "c.yaml: expected YAML of plain values: could not determine"),
        ("a: [", "c.yaml: expected YAML of plain values"),
    ],
)
def test_bad_yaml_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_yaml(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0}, "lr: expected a number above 0, got 0"),
        ({"beta1": 1.0}, "beta1: expected a number at least 0 and below 1, got 1.0"),
        ({"optimizer": "adem"}, r"optimizer: expected one of adam, adamw, got 'adem' \(did you mean 'adam'\?\)"),
        ({"epochs": "many"}, "epochs: expected a whole number, got 'many'"),
        ({"model_options": [1]}, r"model_options: expected names and values, got \[1\]"),
        ({"epoch": 1}, "unknown setting 'epoch': did you mean 'epochs'"),
    ],
)
def test_bad_settings_are_named(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(TrainConfig, {"data": "d", "out": "o", **values})


def test_required_settings_are_named() -> None:
    with pytest.raises(ValueError, match="out: this setting is required"):
        build(TrainConfig, {"data": "d"})


def test_every_setting_has_a_help_text() -> None:
    for cls in (TrainConfig, models.SCANConfig):
        for name, field in fields_of(cls).items():
            assert field.metadata["help"].endswith("."), name


def test_values_from_the_command_line() -> None:
    assert [from_text(text) for text in ("3", "0.5", "true", "null", "i2t", "[1]", "a: b", "'")] == [
        3, 0.5, True, None, "i2t", "[1]", "a: b", "'",
    ]  # fmt: skip


# Schedule


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


def test_constant_schedule() -> None:
    assert rates([0, 1000], lr_schedule="constant") == [1.0, 1.0]


# Plateau


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


# Log


def test_log_truncates_to_a_size(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert log.size == 0
    log.write(step=1, loss=0.5)
    size = log.size
    log.write(step=2, loss=0.25)
    assert read_metrics(log.path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    log.truncate(size)
    assert read_metrics(log.path) == [{"step": 1, "loss": 0.5}]
    log.path.write_text('{"a": 1}\nnope\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl: line 2: expected JSON"):
        read_metrics(log.path)


# Trainer


def test_training_learns_and_leaves_the_run_folder(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", epochs=12, lr=1e-2)
    result = run(settings)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config.json", "last", "metrics.jsonl", "model.safetensors", "train.yaml", "vocab.json",
    ]  # fmt: skip
    log = read_metrics(tmp_path / "run" / "metrics.jsonl")
    train_lines = [line for line in log if line["kind"] == "train"]
    validations = [line for line in log if line["kind"] == "validation"]
    assert [line["step"] for line in train_lines] == list(range(2, 49, 2))
    assert [line["epoch"] for line in validations] == list(range(1, 13))
    assert set(F_itm.recall_summary(torch.tensor([0]), torch.tensor([0]))) < set(validations[0])
    assert train_lines[-1]["loss"] < 0.6 * train_lines[0]["loss"]
    # Ten images and fifty captions: guessing gives about 10, 50 and 100 percent from images, 10, 50 and 100 from text.
    assert result.best["rsum"] == max(line["rsum"] for line in validations) > 420
    assert (result.steps, result.finished) == (48, True)

    best = models.load(tmp_path / "run")
    _, _, dev_data = load_data(settings)
    scores = best(dev_data.image_batch(range(10)), *dev_data.caption_batch(range(50)))
    summary = F_itm.recall_summary(*F_itm.retrieval_ranks(scores, dev_data.caption_image))
    assert summary["rsum"] == pytest.approx(result.best["rsum"])


@pytest.mark.parametrize("excluded", [True, False])
def test_one_step_is_what_the_equations_say(data: Path, tmp_path: Path, excluded: bool) -> None:
    """Loss with or without the captions of the same image as negatives, its gradient clipped, and one Adam step."""
    settings = config(data, tmp_path, grad_clip=0.05, weight_decay=0.1, optimizer="adamw", exclude_same_image=excluded)
    trainer = make_trainer(settings)
    batch = trainer.train_data.batch([0, 1, 2, 20, 31, 44, 57])
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}

    scores = trainer.model(batch.features, batch.token_ids, batch.lengths)
    own = scores.diagonal()
    same_image = batch.image_index[:, None] == batch.image_index
    other = scores.masked_fill(same_image if excluded else torch.eye(7, dtype=torch.bool), -torch.inf)
    loss = (0.2 + other.max(1).values - own).clamp(min=0).sum() + (0.2 + other.max(0).values - own).clamp(min=0).sum()
    gradients = torch.autograd.grad(loss, list(trainer.model.parameters()))
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    assert norm > 0.05

    output = trainer._step(batch)
    assert output["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert output["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert output["lr"] == settings.lr
    for (name, parameter), gradient in zip(trainer.model.named_parameters(), gradients, strict=True):
        clipped = gradient * 0.05 / norm
        expected = before[name] * (1 - settings.lr * 0.1) - settings.lr * clipped / (clipped.abs() + 1e-8)
        # Adam's first step divides by its own size: where the gradient is about 1e-8 rounding decides.
        clear = clipped.abs() > 1e-6
        torch.testing.assert_close(parameter.detach()[clear], expected[clear], rtol=1e-3, atol=1e-7, msg=name)


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


def test_validation_every_few_steps_and_at_the_end(data: Path, tmp_path: Path) -> None:
    run(config(data, tmp_path / "run", validate_unit="step", validate_every=3))
    log = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in log if line["kind"] == "validation"] == [3, 6, 8]


def test_validation_every_other_epoch_and_at_the_end(data: Path, tmp_path: Path) -> None:
    run(config(data, tmp_path / "run", epochs=3, validate_every=2, validation_images=6))
    log = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["epoch"] for line in log if line["kind"] == "validation"] == [2, 3]


def test_a_seed_gives_one_result(data: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        run(config(data, tmp_path / name, epochs=1, seed=seed))
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


@pytest.mark.parametrize("stop_at", [1, 3, 4, 6])
def test_interrupted_and_resumed_equals_uninterrupted(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """Four steps an epoch: a stop in the middle of an epoch, at its end and in the next, with dropout and momentum."""
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


def test_a_folder_with_a_run_is_refused(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", epochs=1)
    run(settings)
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="run: holds a run already; continue it with --resume or choose another --out"):
        run(settings)
    with pytest.raises(ValueError, match=r"run: holds a run with lr = 0.002, not 0.001; choose another --out"):
        run(attrs.evolve(settings, lr=1e-3))
    with pytest.raises(ValueError, match=r"run: holds a run with lr = 0.002, not 0.001"):
        run(attrs.evolve(settings, lr=1e-3), resume=True)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match=r"other: holds no train.yaml; there is no run to resume"):
        run(attrs.evolve(settings, out=str(tmp_path / "other")), resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file: expected a folder for the run, found a file"):
        run(attrs.evolve(settings, out=str(tmp_path / "file")))


def test_bad_input_leaves_no_run_folder(data: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"device": "gpu"}, "device: expected a device such as cpu or cuda, got 'gpu'"),
        ({"model": "scam"}, "unknown model 'scam': did you mean 'scan'"),
        ({"model_options": {"vocab_size": 3}}, "model_options: vocab_size follows from the data and cannot be given"),
        ({"model_options": {"direction": "up"}}, "direction: expected one of t2i, i2t, mean, got 'up'"),
        ({"validation_split": "val"}, "val_ims.npy: no such file"),
        ({"batch_size": 500, "drop_last": True}, "batch_size: 500 is more than the 120 training captions"),
    ):
        with pytest.raises(ValueError, match=message):
            run(config(data, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(config(data, tmp_path))
    handle = trainer.model.image_encoder.fc.bias.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(ValueError, match=r"the norm of the gradient became (inf|nan) at step 0; lower --lr"):
        trainer._step(trainer.train_data.batch([0, 5, 10]))
    handle.remove()
    with torch.no_grad():
        trainer.model.image_encoder.fc.bias[0] = math.nan
    with pytest.raises(ValueError, match="the loss became nan at step 0; lower --lr, or look at the features"):
        trainer._step(trainer.train_data.batch([0, 5, 10]))


def test_bfloat16_trains_close_to_float32(data: Path, tmp_path: Path) -> None:
    losses = {}
    for precision in ("float32", "bfloat16"):
        trainer = make_trainer(config(data, tmp_path, precision=precision))
        losses[precision] = trainer._step(trainer.train_data.batch(range(0, 100, 5)))["loss"]
        assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.05)


def test_a_run_in_bfloat16_learns_and_resumes_exactly(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole run under autocast: it learns as far as in float32, is not the same, and resumes bit for bit."""
    settings = config(data, tmp_path / "float32", epochs=12, lr=1e-2)
    results = {"float32": run(settings)}
    settings = attrs.evolve(settings, precision="bfloat16", out=str(tmp_path / "bfloat16"))
    results["bfloat16"] = run(settings)
    assert {name: result.best["rsum"] > 420 for name, result in results.items()} == {"float32": True, "bfloat16": True}
    assert not same(weights(tmp_path / "float32"), weights(tmp_path / "bfloat16"))
    assert {tensor.dtype for tensor in weights(tmp_path / "bfloat16").values()} == {torch.float32}
    log = read_metrics(tmp_path / "bfloat16" / "metrics.jsonl")
    # The best model, read back and validated in the same precision, gives the recalls of the log.
    _, _, dev_data = load_data(settings)
    with torch.autocast("cpu", torch.bfloat16):
        again = evaluate(models.load(tmp_path / "bfloat16"), dev_data)
    best = next(line for line in log if line["kind"] == "validation" and line["step"] == results["bfloat16"].best_step)
    assert again["rsum"] == pytest.approx(best["rsum"])

    parts = attrs.evolve(settings, out=str(tmp_path / "parts"))
    step = trainer_module.Trainer._step
    with monkeypatch.context() as patch:

        def stopping(self: Trainer, batch: object) -> dict[str, float]:
            if self.engine.state.iteration == 30:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(self, batch)

        patch.setattr(trainer_module.Trainer, "_step", stopping)
        assert run(parts).steps == 30
    assert run(parts, resume=True).steps == 48
    assert same(weights(tmp_path / "bfloat16"), weights(tmp_path / "parts"))


# Checkpoint


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint.pt: no such file; there is no run to resume"):
        load_state(tmp_path)
    save_state(tmp_path, {"position": 3})
    assert load_state(tmp_path)["position"] == 3
    path = tmp_path / "last" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"checkpoint.pt: not a readable training state"):
        load_state(tmp_path)
    torch.save({"format_version": 9}, path)
    with pytest.raises(ValueError, match=r"checkpoint.pt: format_version 9 is newer than 1, the newest that this"):
        load_state(tmp_path)


def test_a_state_with_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "last").mkdir()
    torch.save({"format_version": 1, "hidden": print}, tmp_path / "last" / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"checkpoint.pt: not a readable training state"):
        load_state(tmp_path)


def test_train_yaml_holds_the_settings(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", epochs=1)
    run(settings)
    assert build(TrainConfig, read_yaml(tmp_path / "run" / "train.yaml")) == settings
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["embed_dim"] == 16
    assert to_dict(settings)["model_options"] == OPTIONS


def test_ctrl_c_with_workers_finishes_the_step(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal interrupts the worker processes, too; they leave it to the training process."""
    settings = config(data, tmp_path / "run", epochs=2, workers=1)
    after_step = trainer_module.Trainer._after_step

    def interrupt(self: Trainer, engine: object) -> None:
        if self.engine.state.iteration == 2:
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        after_step(self, engine)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.Trainer, "_after_step", interrupt)
        result = run(settings)
    assert (result.steps, result.finished) == (2, False)
    run(settings, resume=True)
    run(attrs.evolve(settings, out=str(tmp_path / "whole"), workers=0))
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def resident_memory() -> int:
    """The memory that this process holds now, in bytes; the most it ever held where the system does not tell."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def living_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_two_hundred_steps_stay_finite_in_flat_memory(data: Path, tmp_path: Path) -> None:
    """A step that kept its loss with the graph behind it would leave 150 kB and one tensor each."""
    trainer = make_trainer(config(data, tmp_path, lr=5e-3))
    batches = trainer._batches(0)
    losses, memory, tensors = [], [], []
    for step in range(200):
        output = trainer._step(next(batches))
        assert all(math.isfinite(value) for value in output.values()), step
        losses.append(output["loss"])
        if step in (60, 199):
            memory.append(resident_memory())
            tensors.append(living_tensors())
    assert sum(losses[-8:]) < 0.75 * sum(losses[:8])
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())
    assert memory[1] - memory[0] < 4 * 2**20
    assert tensors[1] - tensors[0] < 20


def test_training_on_the_reference_goes_the_same_way(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run with plain PyTorch in the place of the kernels: rounding apart, the same losses and recalls."""
    losses: dict[str, list[float]] = {}
    norms: dict[str, list[float]] = {}
    recalls: dict[str, float] = {}
    calls: Counter[str] = Counter()

    def counting(operator: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*arguments: object, **options: object) -> torch.Tensor:
            calls[operator.__name__] += 1
            return operator(*arguments, **options)

        return call

    for name in ("native", "reference"):
        if name == "reference":
            monkeypatch.setattr(F_itm, "cross_attention_scores", counting(reference.cross_attention_scores))
            monkeypatch.setattr("itm_fast.losses.triplet_loss.triplet_loss", counting(reference.triplet_loss))
        trainer = make_trainer(config(data, tmp_path / name, lr=2e-3))
        batches = trainer._batches(0)
        outputs = [trainer._step(next(batches)) for _ in range(100)]
        losses[name], norms[name] = ([output[key] for output in outputs] for key in ("loss", "grad_norm"))
        recalls[name] = evaluate(trainer.model, trainer.validation_data)["rsum"]
    assert calls == {"cross_attention_scores": 101, "triplet_loss": 100}
    assert losses["native"][:5] == pytest.approx(losses["reference"][:5], rel=1e-4)
    # Clipping and Adam hide the size of the gradient; its norm shows it.
    assert norms["native"][:5] == pytest.approx(norms["reference"][:5], rel=1e-3)
    # Rounding decides now and then which of two negatives is the hardest, and the paths part a little.
    assert losses["native"] == pytest.approx(losses["reference"], rel=0.05, abs=0.5)
    assert losses["native"][-1] < 0.6 * losses["native"][0]
    assert recalls["native"] == pytest.approx(recalls["reference"], abs=30)
    assert min(recalls.values()) > 380
