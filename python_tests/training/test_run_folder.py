"""Which files a new run may overwrite."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from itm_fast import models
from itm_fast.cli import run as main
from itm_fast.data import Vocabulary
from itm_fast.training.run_folder import saved_config
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.runs import config, run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_concepts(tmp_path_factory.mktemp("concepts"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_saved_model_is_not_overwritten(data: Path, tmp_path: Path) -> None:
    models.create("scan", vocab_size=10, feature_dim=8, embed_dim=4, word_dim=4).save(tmp_path / "m")
    before = contents(tmp_path / "m")
    with pytest.raises(ValueError, match=r"m: holds model.safetensors, which this run would overwrite; choose another"):
        run(config(data, tmp_path / "m", epochs=1))
    assert contents(tmp_path / "m") == before


@pytest.mark.parametrize("name", ["config.json", "vocab.json", "metrics.jsonl", "last/checkpoint.pt"])
def test_no_file_of_others_is_overwritten(data: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(ValueError, match=f"out: holds {name}, which this run would overwrite"):
        run(config(data, tmp_path / "out", epochs=1))
    assert file.read_text() == "mine"
    assert not (tmp_path / "out" / "train.yaml").exists()


def test_the_best_model_of_a_run_without_its_state_is_kept(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", epochs=1)
    run(settings)
    (tmp_path / "run" / "last" / "checkpoint.pt").unlink()
    before = contents(tmp_path / "run")
    with pytest.raises(ValueError, match=r"run: holds model\.safetensors, which this run would overwrite"):
        run(settings)
    assert contents(tmp_path / "run") == before


def test_a_run_without_any_state_is_started_anew(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(config(data, out, epochs=1))
    for name in ("last/checkpoint.pt", "model.safetensors", "config.json"):
        (out / name).unlink()
    log = (out / "metrics.jsonl").read_text().count("\n")
    assert run(config(data, out, epochs=1, lr=1e-3)).steps == 4
    assert (out / "metrics.jsonl").read_text().count("\n") == log


@pytest.mark.parametrize("spelling", ["{data}", "{data}/../{name}", "{link}"])
def test_the_folder_of_the_data_is_no_run_folder(tmp_path: Path, spelling: str) -> None:
    data = write_concepts(tmp_path / "data")
    Vocabulary.build(["red ball"], 1).save(data / "vocab.json")
    (tmp_path / "link").symlink_to(data)
    before = contents(data)
    out = spelling.format(data=data, name=data.name, link=tmp_path / "link")
    with pytest.raises(ValueError, match="out: expected another folder than that of the data, got"):
        run(config(data, Path(out), epochs=1))
    assert contents(data) == before


def test_other_files_in_the_folder_are_no_hindrance(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert run(config(data, tmp_path / "run", epochs=1)).steps == 4
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_folder_with_a_run_is_refused(data: Path, tmp_path: Path) -> None:
    settings = config(data, tmp_path / "run", epochs=1)
    run(settings)
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="already contains a run; continue it with --resume or choose another --out"):
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


def test_a_folder_without_write_permission_is_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(data, tmp_path / "run", epochs=1)
    run(settings)
    for folder in (tmp_path / "run", tmp_path / "run" / "last"):
        monkeypatch.setattr("os.access", lambda path, mode, own=folder: (path, mode) != (own, os.W_OK))
        with pytest.raises(ValueError, match=f"^{tmp_path}/run: the folder {folder} is not writable$"):
            run(attrs.evolve(settings, epochs=2), resume=True)


@pytest.mark.parametrize(
    ("settings", "idle", "kept"),
    [
        ({}, {"risk_aggregation": "sum", "conversion_residual": False, "other_batches": "kept"}, {}),
        ({"scenario": "addr", "addr": "base"}, {"risk_aggregation": "sum"}, {}),
        ({"scenario": "addr"}, {"conversion_residual": False}, {"risk_aggregation": "sum"}),
        ({"conversions": 2, "conversion_layer": "adapter"}, {"conversion_residual": False}, {}),
        ({"conversions": 2}, {"risk_aggregation": "sum"}, {"conversion_residual": False}),
        ({"conversions": 2}, {}, {"other_batches": "kept"}),
        ({"conversions": 2, "realignment": False}, {"other_batches": "kept"}, {}),
        ({"conversions": 1}, {"other_batches": "kept"}, {}),
    ],
)
def test_runs_with_former_defaults_resume(
    data: Path, tmp_path: Path, settings: dict[str, Any], idle: dict[str, Any], kept: dict[str, Any]
) -> None:
    """Former defaults without effect become the present ones; those with an effect stay."""
    first = config(data, tmp_path / "run", epochs=1, **settings)
    run(first)
    file = tmp_path / "run" / "train.yaml"
    before = yaml.safe_load(file.read_text()) | idle
    file.write_text(yaml.safe_dump(before))
    first = first.resolved()
    assert saved_config(tmp_path / "run") == first
    run(first, resume=True)
    file.write_text(yaml.safe_dump(before | kept))
    assert attrs.asdict(saved_config(tmp_path / "run")) == attrs.asdict(first) | kept
    for name, value in kept.items():
        with pytest.raises(ValueError, match=f"holds a run with {name} = "):
            run(first, resume=True)
        assert attrs.evolve(first, **{name: value}) == saved_config(tmp_path / "run")


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


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("batch_size: 32", "batch_size: many", "batch_size: expected a whole number, got 'many'"),
        ("data:", "date:", "unknown setting 'date': did you mean 'data'?"),
        ("\nout: ", "\n# out: ", "out: this setting is required"),
        ("seed: 0", "seed: -1", "seed: expected a number at least 0 and at most 18446744073709551615, got -1"),
    ],
)
def test_damaged_settings_are_named_by_their_file(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str, after: str, message: str
) -> None:
    out = tmp_path / "run"
    settings = config(data, out, epochs=1)
    run(settings)
    path = out / "train.yaml"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    assert main(["train", "--out", str(out), "--resume"]) == 1
    assert capsys.readouterr().err == f"itm-fast: error: {path}: {message}\n"
    with pytest.raises(ValueError, match=r".") as error:
        run(settings)
    assert str(error.value) == f"{path}: {message}"
