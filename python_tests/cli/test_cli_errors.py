"""User errors on the command line give one clear line each and leave no files."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from itm_fast import cli, evaluation, models
from itm_fast.config import build, fields_of
from itm_fast.data import PrecomputedDataset, Vocabulary
from itm_fast.files.processors import device_of
from itm_fast.training import TrainConfig
from itm_fast.training.config import read_yaml
from itm_fast.training.run import warn_of_unknown_words
from python_tests.helpers.commands import SMALL, error


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--threads", "-1"], 1, "threads: expected a number at least 0, got -1"),
        (["--device", "mps"], 1, "device: 'mps' was asked for, but torch cannot use such a device here"),
        (["--device", "meta"], 1, "device: 'meta' was asked for, but torch cannot use such a device here"),
        (["--device", "hpu"], 1, "device: 'hpu' was asked for, but torch cannot use such a device here"),
        (["--device", "cuda:99"], 1, "device: 'cuda:99' was asked for, but torch cannot use such a device here"),
        (["--model-option", "name=foo"], 1, "unknown scan setting 'name': known are feature_dim, image_encoder"),
        (["--model-option", "cls=foo"], 1, "unknown scan setting 'cls': known are"),
        (
            ["--model-option", f"embed_dim={10**15}"],
            1,
            "not enough memory; a smaller model, --batch-size or --micro-batch needs less, and --features disk",
        ),
        (
            ["--model-option", f"embed_dim={10**18}"],
            1,
            "not enough memory; a smaller model, --batch-size or --micro-batch needs less, and --features disk",
        ),
        (["--validation-split", "../ok/dev"], 1, "split: expected a name such as test, without folders, got"),
    ],
)
def test_train_errors(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, message: str
) -> None:
    out = tmp_path / "run"
    got, text = error(capsys, "train", "--data", data, "--out", out, *arguments)
    assert (got, message in text) == (status, True), text
    assert not out.exists()


@pytest.mark.parametrize(
    ("yaml", "more", "message"),
    [
        (
            "model_options: null",
            ["--model-option", "embed_dim=8"],
            "model_options: expected names and values, got None",
        ),
        ("model_options: [1]", ["--model-option", "embed_dim=8"], "model_options: expected names and values, got [1]"),
        ("model_options: {1: 2}", [], "model_options: expected names as strings, got 1"),
        ("out: 3", ["--resume"], "3: holds no train.yaml; there is no run to resume"),
    ],
)
def test_configuration_file_errors(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], yaml: str, more: list[str], message: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"data: {data}\nepochs: 1\n{yaml}\n")
    out = [] if "out:" in yaml else ["--out", tmp_path / "run"]
    assert error(capsys, "train", "--config", file, *out, *more) == (1, message)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--threads", "-1"], 2, "Invalid value for '--threads': "),
        (["--minutes", "inf"], 1, "minutes: expected a finite number above 0, got inf"),
        (["--minutes", "nan"], 1, "minutes: expected a finite number above 0, got nan"),
    ],
)
def test_demo_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, message: str
) -> None:
    got, text = error(capsys, "demo", "--out", tmp_path / "demo", *arguments)
    assert (got, message in text) == (status, True), text
    assert not (tmp_path / "demo").exists()


def test_demo_leaves_a_model_alone(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(trained, tmp_path / "m")
    (tmp_path / "m" / "train.yaml").unlink()
    status, message = error(capsys, "demo", "--out", tmp_path / "m")
    assert status == 1
    assert message == f"{tmp_path / 'm'}: holds model.safetensors, which this run would overwrite; choose another --out"
    assert not (tmp_path / "m" / "data").exists()


def test_evaluate_errors(data: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", "--checkpoint", trained, "--data", data]
    for arguments, status, message in (
        (["--threads", "-1"], 2, "Invalid value for '--threads': "),
        (["--device", "meta"], 1, "device: 'meta' was asked for, but torch cannot use such a device here"),
        (["--precision", "float8"], 2, "Invalid value for '--precision': "),
    ):
        got, text = error(capsys, *command, *arguments)
        assert (got, message in text) == (status, True), text


def test_a_vocabulary_of_the_same_size_is_not_taken_for_the_own(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = Vocabulary.from_file(trained / "vocab.json").words
    other = tmp_path / "other.json"
    Vocabulary([*words[:5], *words[:4:-1]]).save(other)
    status, message = error(capsys, "evaluate", "--checkpoint", trained, "--data", data, "--vocab", other)
    assert (status, message) == (
        1, f"{other}: not the vocabulary that the model was trained with, {trained / 'vocab.json'}",
    )  # fmt: skip
    Vocabulary(words).save(other)
    capsys.readouterr()
    assert cli.run(["evaluate", "--checkpoint", str(trained), "--data", str(data), "--vocab", str(other)]) == 0
    assert f"vocabulary: {other}\n" in capsys.readouterr().out


def test_captions_of_unknown_words_are_noticed(data: Path) -> None:
    own = Vocabulary.build(PrecomputedDataset(data, "train", Vocabulary.build([], 1)).captions, 1)
    half = Vocabulary([word for word in own.words if word not in ("red", "ball", "dog")])
    known = PrecomputedDataset(data, "train", half)
    words = [word for caption in known.captions for word in caption.split()]
    assert known.unknown_share == pytest.approx(sum(word in ("red", "ball", "dog") for word in words) / len(words))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unknown_words(known)
    foreign = PrecomputedDataset(data, "train", Vocabulary.build(["some other words"], 1))
    with pytest.warns(
        UserWarning, match="the vocabulary lacks 100% of the words in the captions of train; is it that of"
    ):
        warn_of_unknown_words(foreign)


def test_resume_takes_the_folder_from_the_file(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a run"
    assert cli.run(["train", "--data", str(data), "--out", str(out), *SMALL]) == 0
    assert cli.run(["train", "--config", str(out / "train.yaml"), "--resume", "--epochs", "2"]) == 0
    assert "8 steps in" in capsys.readouterr().out
    assert read_yaml(out / "train.yaml")["epochs"] == 2


def test_resume_help_names_what_may_change(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    assert cli.run(["train", "--help-all"]) == 0
    text = capsys.readouterr().out.split("--resume takes the settings")[1].split("Options")[0]
    free = {name for name, field in fields_of(TrainConfig).items() if field.metadata["free_on_resume"]}
    for name in free - {"out"}:
        assert f"--{name.replace('_', '-')}" in text, name


def test_hints_can_be_pasted_where_folders_have_blanks(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from itm_fast.training import Trainer

    step = Trainer._step

    def stopping(self: Trainer, batch: object) -> dict[str, float]:
        self._request_stop()
        return step(self, batch)

    monkeypatch.setattr(Trainer, "_step", stopping)
    out = tmp_path / "a run"
    assert cli.run(["train", "--data", str(data), "--out", str(out), *SMALL]) == 130
    assert f"stopped after step 1; continue with: itm-fast train --out '{out}' --resume" in capsys.readouterr().err


def test_a_name_unlike_all_others_gets_no_suggestion() -> None:
    with pytest.raises(ValueError, match="unknown setting 'foo': known are data, out, vocab"):
        build(TrainConfig, {"foo": 1})


def test_the_processor_is_a_device() -> None:
    assert device_of("cpu") == torch.device("cpu")


def test_evaluate_in_bfloat16(data: Path, trained: Path, tmp_path: Path) -> None:
    dataset = PrecomputedDataset(data, "test", Vocabulary.from_file(trained / "vocab.json"))
    for precision in ("float32", "bfloat16"):
        file = tmp_path / f"{precision}.json"
        arguments = ["--checkpoint", str(trained), "--data", str(data), "--precision", precision, "--json", str(file)]
        assert cli.run(["evaluate", *arguments]) == 0
        result = json.loads(file.read_text())
        assert (result["precision"], result["vocabulary"]) == (precision, str(trained / "vocab.json"))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            expected = evaluation.evaluate(models.load(trained), dataset)
        assert {key: result[key] for key in expected} == expected


def test_the_precision_reaches_the_encoders(data: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    encode = models.SCAN.encode_images

    def recording(self: models.SCAN, features: torch.Tensor) -> object:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return encode(self, features)

    monkeypatch.setattr(models.SCAN, "encode_images", recording)
    command = ["evaluate", "--checkpoint", str(trained), "--data", str(data)]
    assert cli.run(command) == cli.run([*command, "--precision", "bfloat16"]) == 0
    assert (seen[0][0], seen[-1]) == (False, (True, torch.bfloat16))
