"""The trainer: what a run learns, its log and its files."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path

import pytest
import torch

import itm_fast.functional as F_itm
from itm_fast import models
from itm_fast.models import model_card
from itm_fast.training import run_folder
from itm_fast.training import trainer as trainer_module
from itm_fast.training.metrics_log import MetricsLog, read_metrics
from itm_fast.training.run import load_data
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.runs import config, make_trainer, run, same, stop_at, weights


def test_log_truncates_to_a_size(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert log.size == 0
    log.write(step=1, loss=0.5)
    size = log.size
    log.write(step=2, loss=0.25)
    assert read_metrics(log.path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    log.truncate(size)
    assert read_metrics(log.path) == [{"step": 1, "loss": 0.5}]
    # Half a line of a broken copy remains; the next line must not be appended to it.
    log.path.write_bytes(log.path.read_bytes() + b'{"step": 2, "lo')
    assert read_metrics(log.path) == [{"step": 1, "loss": 0.5}]
    log.truncate(10**15)
    log.write(step=3, loss=0.125)
    assert read_metrics(log.path) == [{"step": 1, "loss": 0.5}, {"step": 3, "loss": 0.125}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nope", "expected JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"[" * 10**5, "expected JSON: "),
        (b"\xff\xfe", "expected JSON: "),
        (b"[1]", "expected names and values, got [1]"),
        (b'{"loss": [1]}', "loss: expected a number below 1e+100 in size, got [1]"),
        (b'{"loss": NaN}', "loss: expected a number below 1e+100 in size, got nan"),
        (b'{"loss": 1e308}', "loss: expected a number below 1e+100 in size, got 1e+308"),
        (b'{"loss": true}', "loss: expected a number below 1e+100 in size, got True"),
        (b'{"step": "1"}', "step: expected a number below 1e+100 in size, got '1'"),
        (b'{"domain_risk": "x"}', "domain_risk: expected a number below 1e+100 in size, got 'x'"),
        (b'{"step": 1' + b"0" * 400 + b"}", "step: expected a number below 1e+100 in size, got 1" + "0" * 59 + "..."),
        (b'{"loss": 1}', "'step' is missing"),
    ],
)
def test_a_log_that_is_none_is_named_with_its_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r".") as error:
        read_metrics(path, ("step",))
    assert str(error.value).startswith(f"{path}: line 2: {message}")
    assert "\n" not in str(error.value)


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
    # Initial weights that differ in their last digit give 0.50 to 0.61, and recalls of 422 to 582.
    assert train_lines[-1]["loss"] < 0.7 * train_lines[0]["loss"]
    # Ten images and fifty captions: guessing gives about 10, 50 and 100 percent from images, 10, 50 and 100 from text.
    assert result.best["rsum"] == max(line["rsum"] for line in validations) > 380
    assert (result.steps, result.finished) == (48, True)

    best = models.load(tmp_path / "run")
    _, _, dev_data = load_data(settings)
    scores = best(dev_data.image_batch(range(10)), *dev_data.caption_batch(range(50)))
    summary = F_itm.recall_summary(*F_itm.retrieval_ranks(scores, dev_data.caption_image))
    assert summary["rsum"] == pytest.approx(result.best["rsum"])


@pytest.mark.parametrize("stopped", [0, 4, 6, 8])
def test_of_equal_validations_the_last_is_the_best(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: int
) -> None:
    """A split that is too easy does not keep an untrained model, also if the run is interrupted."""
    recalls = F_itm.recall_summary(torch.tensor([0]), torch.tensor([0]))
    found = iter([590.0, 600.0, 600.0, 600.0, 598.0])
    monkeypatch.setattr(trainer_module, "evaluate", lambda *_, **__: {**recalls, "rsum": next(found)})
    settings = config(data, tmp_path, epochs=5)
    saved = {}
    save = run_folder.save_models

    def saving(out: str, model: torch.nn.Module, *rest: object) -> None:
        save(out, model, *rest)
        saved.update({name: weight.clone() for name, weight in model.state_dict().items()})

    monkeypatch.setattr(run_folder, "save_models", saving)
    if stopped:
        with monkeypatch.context() as patch:
            stop_at(patch, stopped)
            assert not run(settings).finished
    result = run(settings, resume=bool(stopped))
    assert (result.best_step, result.best["rsum"]) == (16, 600.0)
    log = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in log if line["kind"] == "validation"] == [4, 8, 12, 16, 20]
    kept = models.load(tmp_path).state_dict()
    assert same(kept, saved)
    assert not same(kept, weights(tmp_path))
    assert model_card.Described.of(models.load(tmp_path), tmp_path, None, None).best["step"] == 16


def test_a_validation_split_of_few_images_is_warned_of_once(data: Path, tmp_path: Path) -> None:
    message = (
        "10 images or fewer in dev (10): caption-to-image R@10 is 100 for any model, and the best model can hardly be "
        "told; use more images there (--split of itm-fast data import, --validation-images)"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        run(config(data, tmp_path / "run", epochs=1))
    more = write_concepts(tmp_path / "more", n_dev=11)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "10 images or fewer")
        run(config(data, tmp_path / "run", epochs=2), resume=True)
        run(config(more, tmp_path / "other", epochs=1))


@pytest.mark.parametrize("excluded", [True, False])
def test_one_step_is_what_the_equations_say(data: Path, tmp_path: Path, excluded: bool) -> None:
    """Loss with or without captions of the same image as negatives, clipped gradient, and one Adam step."""
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
        # Adam's first step divides by the gradient's size: at about 1e-8, rounding decides.
        clear = clipped.abs() > 1e-6
        torch.testing.assert_close(parameter.detach()[clear], expected[clear], rtol=1e-3, atol=1e-7, msg=name)


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
