"""Folders of data and feature stores from others: no link is written through, and no special file is waited for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest

from itm_fast import cli
from itm_fast.data import pack, reader, store_format
from itm_fast.data.reader import ShardReader
from itm_fast.files.documents import read_json
from python_tests.data.test_store import write_data
from python_tests.helpers.commands import error

LINK = "is a symbolic link, which is not followed for writing; put the file or folder itself there"
PIPE = "expected a regular file, found a named pipe"
SHARD = "train-00000.safetensors"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


@pytest.fixture
def store(data: Path, tmp_path: Path) -> Path:
    pack(data, tmp_path / "store", dtype="fp32")
    return tmp_path / "store"


def replaced_by_pipe(path: Path) -> str:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return f"{path}: {PIPE}"


@pytest.mark.parametrize("name", ["packing.lock", "vocab.json", "store.json", SHARD, "train-index.safetensors"])
def test_packing_writes_through_no_link(
    store: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The folder contains an interrupted store with recorded shards."""
    out, outside = tmp_path / "other", tmp_path / "outside"
    interrupt_packing(data, out)
    outside.write_bytes(bytes(200))
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(outside)
    status, message = error(capsys, "data", "pack", "--data", data, "--out", out, "--dtype", "fp32")
    assert (status, message) == (1, f"{out / name}: {LINK}")
    assert outside.read_bytes() == bytes(200)


def interrupt_packing(data: Path, out: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_format, "write_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pack(data, out, dtype="fp32")


def test_notes_of_a_store_that_are_a_link_are_not_written(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, outside = tmp_path / "other", tmp_path / "outside"
    interrupt_packing(data, out)
    (out / "unfinished.json").rename(outside)
    (out / "unfinished.json").symlink_to(outside)
    before = outside.read_bytes()
    status, message = error(capsys, "data", "pack", "--data", data, "--out", out, "--dtype", "fp32")
    assert (status, message) == (1, f"{out / 'unfinished.json'}: {LINK}")
    assert outside.read_bytes() == before


@pytest.mark.parametrize("name", [SHARD, "train-index.safetensors", "vocab.json", "store.json"])
def test_a_named_pipe_in_a_store_does_not_hang(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    message = replaced_by_pipe(store / name)
    assert error(capsys, "train", "--data", store, "--out", tmp_path / "run") == (1, message)


@pytest.mark.parametrize("name", [SHARD, "train-index.safetensors", "vocab.json"])
def test_a_check_of_a_store_lists_named_pipes(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    replaced_by_pipe(store / name)
    assert problems(capsys, store, tmp_path) == [(name, PIPE)]


@pytest.mark.parametrize("suffix", ["ims.npy", "caps.txt", "ids.txt", "cap2im.txt", "regions.txt", "boxes.npy"])
def test_a_check_of_data_lists_named_pipes(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    replaced_by_pipe(data / f"train_{suffix}")
    assert (f"train_{suffix}", PIPE) in problems(capsys, data, tmp_path)


def problems(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> list[tuple[str, str]]:
    assert cli.run(["data", "check", str(folder), "--json", str(tmp_path / "report.json")]) == 1
    capsys.readouterr()
    report = read_json(tmp_path / "report.json", 2**20)
    return [(problem["file"], problem["what"]) for problem in report["problems"]]


@pytest.mark.parametrize("native", [True, False])
def test_a_shard_that_becomes_a_named_pipe_was_changed(
    store: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    if not native:
        monkeypatch.setattr(reader, "_host", lambda: None)
    opened = ShardReader([store / SHARD], [(store / SHARD).stat()], "fp32", 1)
    replaced_by_pipe(store / SHARD)
    found = opened.gather(np.array([[0, 200, 4, 0]]), np.empty(4, dtype=np.float32))
    assert found == ("changed", 0, 0)


def test_a_socket_and_a_device_are_named(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "/dev/zero: expected a regular file, found a device"
    assert error(capsys, "train", "--data", data, "--out", tmp_path / "run", "--vocab", "/dev/zero") == (1, message)
    assert error(capsys, "convert", "/dev/zero", "--source", "scan", "--vocab", data / "vocab.json",
                 "--out", tmp_path / "new") == (1, message)  # fmt: skip
    path = data / "train_caps.txt"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))
        message = f"{path}: expected a regular file, found a socket"
        assert error(capsys, "train", "--data", data, "--out", tmp_path / "run") == (1, message)
