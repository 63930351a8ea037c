"""Paths whose bytes are not UTF-8: every command reads and writes them, and prints them with escapes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from itm_fast import cli
from python_tests.helpers.commands import SMALL, error
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.processes import ROOT
from python_tests.helpers.processes import run as run_process

ODD = os.fsdecode(b"\xff")
ESCAPED = "\\udcff"


def command(*arguments: object) -> str:
    """Run a command with the output streams that the command line sets, and return its output."""
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace") for _ in range(2))
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        status = cli.run([str(argument) for argument in arguments])
    printed = [(stream.flush(), stream.buffer.getvalue().decode())[1] for stream in (stdout, stderr)]
    assert (status, "rror" in printed[1]) == (0, False), printed[1]
    return printed[0]


def test_a_process_with_strict_output_prints_the_path(folder: Path) -> None:
    words = [sys.executable, "-m", "itm_fast", "data", "check", folder / "data"]
    done = run_process(words, cwd=ROOT, PYTHONIOENCODING="utf-8:strict")
    assert done.returncode == 0, done.stderr
    assert ESCAPED in done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with such a name that holds the data set `data` and the run `run`."""
    folder = tmp_path_factory.mktemp("paths") / ODD
    folder.mkdir()
    data = write_concepts(folder / "data")
    assert ESCAPED in command("train", "--data", data, "--out", folder / "run", *SMALL, "--tensorboard")
    return folder


def test_a_run_is_resumed_and_evaluated(folder: Path) -> None:
    run, data = shutil.copytree(folder / "run", folder / ODD), folder / "data"
    assert ESCAPED in command("train", "--resume", "--out", run, "--epochs", 2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if line["kind"] == "validation"] == [1, 2]
    assert list((run / "tensorboard").iterdir())
    command("evaluate", "--checkpoint", run, "--data", data, "--split", "dev", "--json", folder / "result.json")
    assert json.loads((folder / "result.json").read_text())["checkpoint"] == str(run)
    command("explain", "--checkpoint", run, "--data", data, "--split", "dev", "--image", 0, "--caption", 0,
            "--out", folder / "pair.html")  # fmt: skip
    assert ESCAPED in (folder / "pair.html").read_text(encoding="utf-8")
    # The legend shows the run name.
    command("curves", run, "--out", folder / "curves.svg")


def test_discriminators_on_disk_are_saved_and_read(folder: Path) -> None:
    run = folder / "addr"
    command("train", "--data", folder / "data", "--out", run, *SMALL, "--scenario", "addr")
    command("train", "--resume", "--out", run, "--epochs", 2, "--discriminators-on-disk")
    assert len(list((run / "last").glob("discriminators-*"))) == 1


def test_a_store_is_packed_checked_and_trained_on(folder: Path) -> None:
    store = folder / "store"
    command("data", "pack", "--data", folder / "data", "--out", store)
    command("data", "check", store, "--json", folder / "check.json")
    assert json.loads((folder / "check.json").read_text())["folder"] == str(store)
    command("train", "--data", store, "--out", folder / "packed", *SMALL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--data", "{}/none", "--out", "{}/new"), "{}/none: no such data directory"),
        (("train", "--config", "{}/none.yaml"), "{}/none.yaml: no such configuration file"),
        (("train", "--config", "{}/surrogate.yaml"), "{}/surrogate.yaml: expected YAML of plain values: "
         "expected Unicode characters, found the lone surrogate '\\ud800'"),
        (("data", "pack", "--data", "{}/splits", "--out", "{}/packed_splits"),
         f"{{}}/splits: split '{ESCAPED}': expected a name in UTF-8; rename its files"),
        (("convert", "{}/damaged.pth", "--source", "scan", "--vocab", "{}/run/vocab.json", "--out", "{}/converted"),
         "{}/damaged.pth: not a readable checkpoint: damaged, or not written by torch.save"),
    ],
)  # fmt: skip
def test_one_line_names_the_path(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    if not (folder / "splits").exists():
        shutil.copytree(folder / "data", folder / "splits")
        for path in list((folder / "splits").glob("dev_*")):
            shutil.copy(path, path.with_name(path.name.replace("dev", ODD)))
        (folder / "surrogate.yaml").write_text('data: "\\uD800"\n')
        (folder / "damaged.pth").write_bytes(b"PK\x03\x04")
    found = error(capsys, *(one.format(folder) for one in arguments))
    assert found == (1, message.format(str(folder).replace(ODD, ESCAPED)))
