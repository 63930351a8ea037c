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
