"""FDF's cross-model realignment: frozen and trained parts, the table of all models, the figure, rejected input."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from benchmarks import realignment
from itm_fast import cli, evaluation, models
from itm_fast.data import PrecomputedDataset, Vocabulary, emoji
from itm_fast.report import features
from itm_fast.report.features import pooled_features
from itm_fast.training import Trainer
from itm_fast.training.checkpoint import load_state
from itm_fast.training.config import read_yaml
from itm_fast.training.fdf.cross_model import extractor_of
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.bert import write_bert
from python_tests.helpers.commands import error
from python_tests.helpers.concepts import with_boxes
from python_tests.helpers.runs import OPTIONS, config, run, same, stop_at, weights

WARM_UP = {"warmup_epochs": 1, "lr_warmup_steps": 4}


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two trainings of a global model that differ only in their seeds."""
    folder = tmp_path_factory.mktemp("runs")
    options = {**OPTIONS, "text_pooling": "mean", "image_pooling": "mean", "word_dropout": 0.2}
    for seed in (0, 1):
        run(config(data, folder / str(seed), model="vse_infty", model_options=options, seed=seed, **WARM_UP))
    return [folder / "0", folder / "1"]


def arguments(data: Path, runs: list[Path], out: Path, *more: object) -> list[str]:
    command = ["realign", "--extractor", runs[0], "--heads", runs[1], "--data", data, "--out", out, "--epochs", "1"]
    return [str(part) for part in (*command, *more)]


def test_heads_are_trained_above_the_other_extractor(
    data: Path, runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The extractor equals the first model's bit for bit, heads start from the second; every table entry is checked."""
    out, table, figure = tmp_path / "out", tmp_path / "table.json", tmp_path / "features.png"
    assert cli.run(arguments(data, runs, out, "--json", table, "--figure", figure)) == 0
    members = dict(zip(("model 1", "model 2", "realigned"), map(models.load, (*runs, out)), strict=True))
    first, second, realigned = members.values()
    frozen = list(extractor_of(realigned))
    assert frozen == ["text_encoder.embed", "text_encoder.dropout", "text_encoder.rnn"]
    for name, value in realigned.state_dict().items():
        if any(name.startswith(part) for part in frozen):
            assert torch.equal(value, first.state_dict()[name]), name
        elif name.endswith("weight"):
            moved = float((value - second.state_dict()[name]).abs().mean())
            # Four steps of Adam, each at most about as large as the rate.
            assert 0 < moved < 4.1 * 2e-3, name
    settings = read_yaml(out / "train.yaml")
    assert (settings["seed"], settings["epochs"], settings["lr"]) == (1, 1, 2e-3)
    assert {name: settings[name] for name in WARM_UP} == WARM_UP
    rates = [line["lr"] for line in read_metrics(out / "metrics.jsonl") if line["kind"] == "train"]
    assert rates == pytest.approx([2e-3 * step / 4 for step in (2, 4)])
    found = json.loads(table.read_text())["rsum"]
    test = PrecomputedDataset(data, "test", Vocabulary.from_file(out / "vocab.json"))
    images = {name: model.encode_images(test.image_batch(torch.arange(10))) for name, model in members.items()}
    captions = {name: model.encode_captions(*test.caption_batch(torch.arange(50))) for name, model in members.items()}
    for of_images in members:
        for of_captions in members:
            scores = (images[of_images] @ captions[of_captions].t()).detach()
            expected = evaluation.evaluate_scores(scores, test.caption_image)["rsum"]
            assert found[of_images][of_captions] == pytest.approx(expected)
        assert found[of_images][of_images] == evaluation.evaluate(members[of_images], test)["rsum"]
    printed = capsys.readouterr().out
    assert f"{found['model 1']['model 2']:.1f}" in printed
    assert figure.read_bytes().startswith(b"\x89PNG")
    pooled = pooled_features(members["model 2"], test, 4)
    torch.testing.assert_close(pooled[0], images["model 2"][:4].detach())
    torch.testing.assert_close(pooled[1], captions["model 2"][::5][:4].detach())


def test_models_that_read_boxes_are_realigned(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is written before the figure is drawn."""
    located = with_boxes(data, tmp_path / "located")
    runs = [tmp_path / "0", tmp_path / "1"]
    for seed in (0, 1):
        run(config(located, runs[seed], model="pfan", model_options=OPTIONS, seed=seed, epochs=1))

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(features, "write_features", full)
    out, table = tmp_path / "out", tmp_path / "table.json"
    assert cli.run(arguments(located, runs, out, "--json", table, "--figure", tmp_path / "features.png")) == 1
    model = models.load(out)
    test = PrecomputedDataset(located, "test", Vocabulary.from_file(out / "vocab.json"))
    model.prepare(test)
    found = json.loads(table.read_text())["rsum"]
    assert found["realigned"]["realigned"] == evaluation.evaluate(model, test)["rsum"]


def test_the_folder_of_bert_may_be_gone(data: Path, tmp_path: Path) -> None:
    bert = write_bert(tmp_path / "bert")
    runs = [tmp_path / "0", tmp_path / "1"]
    for seed in (0, 1):
        options = {"model": "vse_infty", "model_options": {"embed_dim": 16}, "bert": str(bert)}
        run(config(data, runs[seed], seed=seed, epochs=1, **options))
    shutil.rmtree(bert)
    out = tmp_path / "out"
    assert cli.run(arguments(data, runs, out)) == 0
    assert (out / "vocab.json").read_bytes() == (runs[1] / "vocab.json").read_bytes()
    words = extractor_of(models.load(out))["text_encoder.bert"].state_dict()
    assert same(words, extractor_of(models.load(runs[0]))["text_encoder.bert"].state_dict())


@pytest.mark.parametrize("by", ["SIGTERM", "error"])
def test_an_interrupted_realignment_goes_on_exactly(
    data: Path, runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    by: str,
) -> None:  # fmt: skip
    """The interruption is in the second epoch, after a validation. A better model replaces the earlier one."""
    whole, parts, epochs = tmp_path / "whole", tmp_path / "parts", ("--epochs", "3")
    assert cli.run(arguments(data, runs, whole, *epochs)) == 0
    step = Trainer._step

    def disturbed(self: Trainer, batch: object, mining: str | None = None) -> dict[str, float]:
        if self.engine.state.iteration == 6:
            if by == "error":
                raise ValueError("power cut")
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, mining)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", disturbed)
        capsys.readouterr()
        assert cli.run(arguments(data, runs, parts, *epochs)) == (130 if by == "SIGTERM" else 1)
    said = "stopped; the same command with --resume goes on from there\n"
    assert capsys.readouterr().err == (said if by == "SIGTERM" else "itm-fast: error: power cut\n")
    state = load_state(parts)
    assert state["position"] == (6 if by == "SIGTERM" else 4)

    checkpoint = parts / "last" / "checkpoint.pt"
    other = (
        f"frozen weights: not those that the run to resume was started with ({checkpoint}); build the model with the "
        "same seed and the same pretrained weights"
    )
    again = f"{parts}: already contains a run; continue it with --resume or choose another --out"
    assert error(capsys, *arguments(data, runs, parts, *epochs)) == (1, again)
    # Training would change all weights, and heads trained with the first model would differ.
    assert error(capsys, "train", "--out", parts, "--resume") == (1, other)
    assert error(capsys, *arguments(data, [runs[1], runs[1]], parts, *epochs, "--resume")) == (1, other)
    nothing = tmp_path / "nothing"
    assert error(capsys, *arguments(data, runs, nothing, "--resume")) == (
        1, f"{nothing}: holds no train.yaml; there is no run to resume",
    )  # fmt: skip
    assert not nothing.exists()

    assert cli.run(arguments(data, runs, parts, *epochs, "--resume")) == 0
    left, right = (load_state(folder) for folder in (whole, parts))
    assert same(left["model"], right["model"])
    assert same(weights(whole), weights(parts))
    moments = [one["optimizer"]["state"] for one in (left, right)]
    assert moments[0].keys() == moments[1].keys()
    assert all(same(moments[0][index], moments[1][index]) for index in moments[0])
    logs = [read_metrics(folder / "metrics.jsonl") for folder in (whole, parts)]
    for line in [*logs[0], *logs[1]]:
        assert line.pop("seconds") >= 0
    assert logs[0] == logs[1]


def test_frozen_parts_stay_in_evaluation_mode(data: Path, runs: list[Path]) -> None:
    from itm_fast.training.fdf.cross_model import freeze

    model = models.load(runs[0])
    for part in extractor_of(model).values():
        freeze(part)
    model.train()
    assert [model.training, model.image_encoder.training] == [True, True]
    words = model.text_encoder
    assert [words.dropout.p, words.dropout.training, words.rnn.training] == [0.2, False, False]
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning == {name for name, _ in model.named_parameters() if name.startswith("image_encoder.")}


def test_the_committed_comparison_is_one_of_such_runs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committed result has two seeds of one model, the realigned model, and every pair of them."""
    monkeypatch.setattr(emoji, "write_dataset", lambda _folder: data)
    shared = {"model": "vse_infty", "epochs": 1, "batch_size": 32}
    hosts = {
        "GRU": {**shared, "model_options": OPTIONS},
        "BERT": {**shared, "model_options": {"embed_dim": 16}, "bert": "a small one"},
    }
    results = realignment.run(tmp_path, hosts=hosts)
    names = ("model 1", "model 2", "realigned")
    for host, table in results["rsum"].items():
        folders = {name: tmp_path / f"{host}-{name.replace(' ', '-')}" for name in names}
        test = PrecomputedDataset(data, "test", Vocabulary.from_file(folders["realigned"] / "vocab.json"))
        assert {name: row[name] for name, row in table.items()} == {
            name: evaluation.evaluate(models.load(folder), test)["rsum"] for name, folder in folders.items()
        }
        assert [read_yaml(folder / "train.yaml")["seed"] for folder in folders.values()] == [0, 1, 1]
    # Both trainings start from the same BERT.
    assert read_yaml(tmp_path / "BERT-model-1" / "train.yaml")["bert"] == str(tmp_path / "bert")
    assert (results["images"], list(results["rsum"])) == (10, ["GRU", "BERT"])
    # The figure has a point for each of the ten images of each model, and one for its first caption.
    points = {side: {name: len(rows) for name, rows in parts.items()} for side, parts in results["planes"].items()}
    assert points == {side: dict.fromkeys(names, 10) for side in ("Images", "Captions")}
    realignment.draw(tmp_path / "features.svg", results)
    assert (tmp_path / "features.svg").read_text().splitlines()[-1] == realignment.source(results)
    rows = realignment.markdown(results).splitlines()
    crossed = results["rsum"]["GRU"]["model 1"]
    assert rows[2] == f"| images of model 1 | {' | '.join(f'{crossed[name]:.1f}' for name in names)} |"
    assert [row for row in rows if row.startswith("| BERT")] == [
        f"| BERT | {' | '.join(f'captions of {name}' for name in names)} |"
    ]


def test_a_stopped_comparison_trains_no_other_model(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emoji, "write_dataset", lambda _folder: data)
    stop_at(monkeypatch, 1)
    hosts = {"GRU": {"model": "vse_infty", "epochs": 1, "batch_size": 32, "model_options": OPTIONS}}
    with pytest.raises(SystemExit, match="stopped by a signal"):
        realignment.run(tmp_path, hosts=hosts)
    assert [path.name for path in tmp_path.iterdir()] == ["GRU-model-1"]


def test_bad_input_is_one_line_and_writes_nothing(
    data: Path, runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    run(config(data, other, epochs=1, model_options=OPTIONS))
    out = tmp_path / "out"
    assert error(capsys, *arguments(data, [other, runs[1]], out)) == (
        1, f"{other}: was trained with model = 'scan', {runs[1]} with vse_infty",
    )  # fmt: skip
    assert error(capsys, *arguments(data, [tmp_path / "none", runs[1]], out)) == (
        1, f"{tmp_path / 'none'}: no such run directory",
    )  # fmt: skip
    assert error(capsys, *arguments(data, runs, runs[0]))[1].startswith(f"{runs[0]}: holds a run")
    assert not out.exists()
