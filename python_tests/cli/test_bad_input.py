"""Malformed or hostile input files give one error line that names the file; no code runs and nothing is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from itm_fast import models
from itm_fast.data import Vocabulary
from python_tests.helpers.commands import SMALL, error


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Copy a trained run, to be damaged by the test."""
    return shutil.copytree(trained, tmp_path / "run")


def evaluate_error(capsys: pytest.CaptureFixture[str], run: Path, data: Path) -> str:
    status, message = error(capsys, "evaluate", "--checkpoint", run, "--data", data)
    assert status == 1
    return message


def resume_error(capsys: pytest.CaptureFixture[str], run: Path) -> str:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    status, message = error(capsys, "train", "--out", run, "--resume", "--epochs", "2")
    assert status == 1
    assert {path: path.read_bytes() for path in before} == before
    return message


def test_weights_of_another_model(data: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights of another model, or of the same model in another size, are rejected."""
    sizes = {"vocab_size": models.load(run).config.vocab_size, "feature_dim": 8, "embed_dim": 16, "word_dim": 12}
    models.create("vsepp", **sizes).save(tmp_path / "vsepp")
    models.create("scan", **{**sizes, "embed_dim": 20}).save(tmp_path / "wide")
    weights = run / "model.safetensors"
    for other, message in (
        ("vsepp", "the weight text_encoder.rnn.weight_ih_l0_reverse is missing"),
        ("wide", "image_encoder.fc.weight: expected shape (16, 8), got (20, 8)"),
    ):
        shutil.copy(tmp_path / other / "model.safetensors", weights)
        assert evaluate_error(capsys, run, data) == f"{weights}: {message}"


def test_a_configuration_of_another_model(
    data: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": models.load(run).config.vocab_size, "feature_dim": 8, "embed_dim": 16, "word_dim": 12}
    models.create("vsepp", **sizes).save(tmp_path / "vsepp")
    shutil.copy(tmp_path / "vsepp" / "config.json", run / "config.json")
    assert evaluate_error(capsys, run, data) == (
        f"{run / 'model.safetensors'}: the weight text_encoder.rnn.bias_hh_l0_reverse is unknown to the model"
    )


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_weights(data: Path, run: Path, capsys: pytest.CaptureFixture[str], share: float) -> None:
    path = run / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    size, header = path.stat().st_size, int.from_bytes(whole[:8], "little")
    assert evaluate_error(capsys, run, data) == {
        0.0: f"{path}: not a readable safetensors file (0 bytes)",
        0.001: f"{path}: truncated: the header has {header:,} bytes, the file {size:,}",
    }.get(share, f"{path}: truncated: the header promises {len(whole):,} bytes, the file has {size:,}")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("name", "row"), [("image_encoder.fc.weight", 2), ("text_encoder.rnn.bias_ih_l0_reverse", 21)])
def test_a_weight_that_is_not_finite(
    data: Path, run: Path, capsys: pytest.CaptureFixture[str], name: str, row: int, value: float
) -> None:
    """The message names the first such row."""
    path = run / "model.safetensors"
    weights = load_file(path)
    weights[name].view(-1)[21] = value
    weights[name][-1] = value
    save_file(weights, path)
    assert evaluate_error(capsys, run, data) == f"{path}: {name}: row {row} holds values that are not finite"


def test_a_feature_that_is_not_finite(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(data, tmp_path / "broken")
    path = broken / "test_ims.npy"
    features = np.load(path)
    features[3, 1, 2] = np.nan
    np.save(path, features)
    assert evaluate_error(capsys, trained, broken) == f"{path}: row 3 holds values that are not finite in float32"


@pytest.mark.parametrize("change", [lambda words: [*words, "more"], lambda words: words[:-1]])
def test_a_vocabulary_of_another_size(
    data: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[list[str]], list[str]]
) -> None:
    words = Vocabulary.from_file(run / "vocab.json").words
    expected = f"{len(change(words))} words, but the model in {run} knows {len(words)}"
    given = tmp_path / "given.json"
    Vocabulary(change(words)).save(given)
    assert error(capsys, "evaluate", "--checkpoint", run, "--data", data, "--vocab", given) == (
        1,
        f"{given}: {expected}",
    )
    # A vocabulary that replaces the one in the run gives the same message.
    shutil.copy(given, run / "vocab.json")
    assert evaluate_error(capsys, run, data) == f"{run / 'vocab.json'}: {expected}"


class Attack:
    """An object that makes a folder when Python unpickles it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_state_that_holds_code(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], zipped: bool) -> None:
    path, mark = run / "last" / "checkpoint.pt", tmp_path / "was-run"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "best": Attack(mark)}, path, _use_new_zipfile_serialization=zipped)
    assert resume_error(capsys, run) == (
        f"{path}: not a readable training state: names the Python object {os.mkdir.__module__}.mkdir, which is not "
        "allowed; no code was run"
    )
    assert not mark.exists()


def test_features_that_hold_code(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken, mark = shutil.copytree(data, tmp_path / "broken"), tmp_path / "was-run"
    path = broken / "train_ims.npy"
    np.save(path, np.array([Attack(mark)], dtype=object), allow_pickle=True)
    status, message = error(capsys, "train", "--data", broken, "--out", tmp_path / "run", *SMALL)
    assert (status, message.startswith(f"{path}: not a readable .npy array of numbers (")) == (1, True)
    assert not mark.exists()
    # numpy.load with pickles allowed runs the attack, so the test can fail.
    np.load(path, allow_pickle=True)
    assert mark.is_dir()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_state(run: Path, capsys: pytest.CaptureFixture[str], share: float) -> None:
    path = run / "last" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert resume_error(capsys, run) == (
        f"{path}: not a readable training state: damaged, or not written by torch.save"
    )


def test_a_state_of_another_kind(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "last" / "checkpoint.pt"
    torch.save([1, 2], path)
    assert resume_error(capsys, run) == (
        f"{path}: not a readable training state: expected names and values, got a list"
    )
