"""Symbolic links and special files in an untrusted run directory cause no outside writes and no hangs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from itm_fast import cli
from itm_fast.files import atomic
from python_tests.helpers.commands import error, train_small
from python_tests.helpers.concepts import write_concepts

LINK = "is a symbolic link, which is not followed for writing; put the file or folder itself there"


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def moved_out(run: Path, name: str) -> Path:
    """Move an entry of the run out of it, and leave a symbolic link in its place."""
    outside = run.parent / "outside"
    (outside / name).parent.mkdir(parents=True)
    if (run / name).exists():
        shutil.move(run / name, outside / name)
    else:
        (outside / name).mkdir()
    (run / name).symlink_to(outside / name)
    return outside


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "last",
        "last/lock",
        "last/checkpoint.pt",
        "train.yaml",
        "vocab.json",
        "config.json",
        "model.safetensors",
        "branches",
        "tensorboard",
        "wandb",
        "mlflow",
    ],
)
def test_a_resumed_run_writes_through_no_link(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    outside = moved_out(run, name)
    before = contents(outside), contents(run)
    message = f"{run / name}: {LINK}"
    assert error(capsys, "train", "--resume", "--out", run, "--epochs", 2, "--tensorboard") == (1, message)
    assert (contents(outside), contents(run)) == before


@pytest.mark.parametrize("name", ["branches/1", "branches/1/vocab.json", "last/discriminators-3.safetensors"])
def test_links_in_folders_of_the_run_are_refused(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    outside = moved_out(run, name)
    before = contents(outside)
    assert error(capsys, "train", "--resume", "--out", run, "--epochs", 2) == (1, f"{run / name}: {LINK}")
    assert contents(outside) == before


def test_a_link_to_nothing_creates_no_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(run.parent / "new")
    message = f"{run / 'metrics.jsonl'}: {LINK}"
    assert error(capsys, "train", "--resume", "--out", run, "--epochs", 2) == (1, message)
    assert not (run.parent / "new").exists()


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "last", "last/checkpoint.pt", "train.yaml", "vocab.json", "tensorboard"]
)
def test_a_link_that_appears_after_the_check_is_refused_by_the_writer(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    outside = moved_out(run, name)
    before = contents(outside)
    monkeypatch.setattr(atomic, "check_entries", lambda _root, _names: None)
    assert cli.run(["train", "--resume", "--out", str(run), "--epochs", "2", "--tensorboard"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"itm-fast: error: {run / name}: {LINK}"
    assert contents(outside) == before


def test_models_of_branches_are_written_through_no_link(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train_small(data, run, "--scenario", "oss")
    outside = moved_out(run, "branches/1")
    before = contents(outside)
    monkeypatch.setattr(atomic, "check_entries", lambda _root, _names: None)
    assert cli.run(["train", "--resume", "--out", str(run), "--epochs", "2"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"itm-fast: error: {run / 'branches' / '1'}: {LINK}"
    assert contents(outside) == before


def test_a_new_run_writes_through_no_link(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last").symlink_to(tmp_path / "outside")
    message = f"{tmp_path / 'run' / 'last'}: {LINK}"
    assert error(capsys, "train", "--data", data, "--out", tmp_path / "run") == (1, message)
    assert list((tmp_path / "outside").iterdir()) == []


def test_the_named_directory_itself_may_be_a_link(data: Path, tmp_path: Path) -> None:
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "run")
    train_small(data, tmp_path / "run")
    train_small(data, tmp_path / "run", "--resume", "--epochs", "2", "--tensorboard")
    assert (tmp_path / "run").is_symlink()
    assert {"last", "model.safetensors", "tensorboard"} <= {path.name for path in (tmp_path / "disk" / "run").iterdir()}


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "last/lock", "last/checkpoint.pt", "train.yaml", "vocab.json", "model.safetensors"]
)
def test_a_named_pipe_in_a_run_does_not_hang(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    message = f"{run / name}: expected a regular file, found a named pipe"
    assert error(capsys, "train", "--resume", "--out", run, "--epochs", 2) == (1, message)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.json"])
def test_a_named_pipe_in_a_model_does_not_hang(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    message = f"{run / name}: expected a regular file, found a named pipe"
    assert error(capsys, "evaluate", "--checkpoint", run, "--data", data, "--split", "dev") == (1, message)


@pytest.mark.parametrize("name", ["train_caps.txt", "train_ims.npy", "train_ids.txt", "vocab.json"])
def test_a_named_pipe_in_the_data_does_not_hang(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    data = write_concepts(tmp_path / "data")
    (data / name).unlink(missing_ok=True)
    os.mkfifo(data / name)
    message = f"{data / name}: expected a regular file, found a named pipe"
    assert error(capsys, "train", "--data", data, "--out", tmp_path / "run") == (1, message)
