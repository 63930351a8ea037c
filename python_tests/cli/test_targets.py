"""Commands check what they write before they work, and spare what they read."""

from __future__ import annotations

from pathlib import Path

import pytest

from itm_fast.cli.targets import check_targets
from python_tests.helpers.commands import error


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Write a run directory and a data folder whose files are enough for checks of names."""
    run, data = tmp_path / "run", tmp_path / "data"
    for folder, names in ((run, ("config.json", "model.safetensors", "vocab.json")), (data, ("test_ims.npy",))):
        folder.mkdir()
        for name in names:
            (folder / name).write_text("kept")
    return run, data


@pytest.mark.parametrize("command", ["explain", "speech"])
def test_targets_spare_the_run_the_data_and_each_other(
    command: str, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = folders
    link, own = tmp_path / "link.svg", tmp_path / "own"
    link.symlink_to(run / "vocab.json")
    words = [command, "--checkpoint", run, "--data", data, *(["--caption", 0] if command == "explain" else [])]
    more = "--picture" if command == "explain" else "--tags"
    for options, message in (
        (["--out", run / "config.json"], f"--out: {run}/config.json is a file of --checkpoint {run}"),
        (["--out", run / "model.safetensors"], f"--out: {run}/model.safetensors is a file of --checkpoint {run}"),
        (["--json", run / "vocab.json"], f"--json: {run}/vocab.json is a file of --checkpoint {run}"),
        (["--out", data / "test_ims.npy"], f"--out: {data}/test_ims.npy is a file of --data {data}"),
        (["--json", data / "test_ims.npy"], f"--json: {data}/test_ims.npy is a file of --data {data}"),
        (["--out", own, "--json", own], f"--json: {own} is also given as --out"),
        (["--out", own, more, own], f"--out: {own} is also given as {more}"),
        (["--out", own, "--vocab", own], f"--out: {own} is also given as --vocab"),
    ):
        assert error(capsys, *words, *options) == (1, f"{message}; choose another file to write")
    status, message = error(capsys, *words, "--out", link)
    assert status == 1
    assert "link" in message
    assert not own.exists()
    assert {path.read_text() for path in (*run.iterdir(), *data.iterdir())} == {"kept"}


def test_pages_beside_the_model_may_be_written_again(folders: tuple[Path, Path]) -> None:
    run, _ = folders
    for name in ("page.html", "result.json"):
        (run / name).write_text("old")
        check_targets({"--out": run / name}, {}, [("--checkpoint", run)])


def test_evaluate_spares_the_run(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run, data = folders
    target = run / "config.json"
    assert error(capsys, "evaluate", "--checkpoint", run, "--data", data, "--json", target) == (
        1, f"--json: {target} is a file of --checkpoint {run}; choose another file to write",
    )  # fmt: skip


def test_realign_spares_both_runs_and_the_data(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = folders
    none, own, weights = tmp_path / "none", tmp_path / "own", run / "model.safetensors"
    for first, second, options, message in (
        (run, none, ["--json", run / "config.json"], f"--json: {run}/config.json is a file of --extractor {run}"),
        (none, run, ["--json", run / "config.json"], f"--json: {run}/config.json is a file of --heads {run}"),
        (none, run, ["--figure", weights], f"--figure: {weights} is a file of --heads {run}"),
        (none, none, ["--json", data / "test_ims.npy"], f"--json: {data}/test_ims.npy is a file of --data {data}"),
        (none, none, ["--figure", own, "--json", own], f"--json: {own} is also given as --figure"),
    ):  # fmt: skip
        words = ["realign", "--extractor", first, "--heads", second, "--data", data, "--out", tmp_path / "new"]
        assert error(capsys, *words, *options) == (1, f"{message}; choose another file to write")
    words = ["realign", "--extractor", none, "--heads", none, "--data", data, "--out", run, "--resume"]
    assert error(capsys, *words, "--json", run / "vocab.json") == (
        1, f"--json: {run}/vocab.json is a file of --out {run}; choose another file to write",
    )  # fmt: skip
    assert {path.read_text() for path in (*run.iterdir(), *data.iterdir())} == {"kept"}


def test_a_page_of_results_spares_queries_pictures_and_the_index(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = folders
    index, file = tmp_path / "index", tmp_path / "file"
    index.mkdir()
    for path in (index / "index.json", index / "images-0.safetensors", file):
        path.write_text("kept")
    for options, target, message in (
        (["--queries", file], file, "is also given as --queries"),
        (["--image", tmp_path / "other", "--image", file], file, "is also given as --image"),
        (["a", "--checkpoint", run], run / "vocab.json", f"is a file of --checkpoint {run}"),
        (["a", "--encoder", run], run / "config.json", f"is a file of --encoder {run}"),
        (["a"], index / "index.json", f"is a file of INDEX {index}"),
        (["a"], index / "images-0.safetensors", f"is a file of INDEX {index}"),
    ):
        assert error(capsys, "search", index, *options, "--html", target) == (
            1, f"--html: {target} {message}; choose another file to write",
        )  # fmt: skip
    assert {path.read_text() for path in (*run.iterdir(), *index.iterdir(), file)} == {"kept"}


def test_data_check_spares_the_data_and_the_vocabulary(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = folders
    vocabulary, features = run / "vocab.json", data / "test_ims.npy"
    for options, message in (
        (["--json", features], f"--json: {features} is a file of DIR {data}"),
        (["--vocab", vocabulary, "--json", vocabulary], f"--json: {vocabulary} is also given as --vocab"),
    ):
        assert error(capsys, "data", "check", data, *options) == (1, f"{message}; choose another file to write")
    assert {path.read_text() for path in (*run.iterdir(), *data.iterdir())} == {"kept"}


@pytest.mark.parametrize(
    "words",
    [
        ["speech", "--checkpoint", "none", "--data", "none", "--out"],
        ["features", "--checkpoint", "none", "--data", "none", "--out"],
        ["curves", "none", "--out"],
        ["realign", "--extractor", "none", "--heads", "none", "--data", "none", "--out", "run", "--figure"],
    ],
)
def test_the_suffix_of_a_figure_is_checked_first(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert error(capsys, *words, "a.gif") == (1, "a.gif: expected a name that ends in .svg, .png or .pdf")
