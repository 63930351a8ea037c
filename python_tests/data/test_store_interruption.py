"""Packing that is interrupted, killed, or stopped by a full disk continues and gives the same store."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from itm_fast.data import PrecomputedDataset, digests, pack, store_format
from itm_fast.data.check import Problem
from itm_fast.data.check_store import check_store
from itm_fast.data.store_format import MANIFEST, PICTURES_FOLDER, UNFINISHED, ShardRecord
from itm_fast.files import atomic, lock
from python_tests.data.test_store import write_data
from python_tests.helpers.commands import error
from python_tests.helpers.full_disk import no_file_above
from python_tests.helpers.processes import ROOT
from python_tests.helpers.processes import run as run_process
from python_tests.training.test_full_disk import contents

# The package has a function of this name.
pack_module = importlib.import_module("itm_fast.data.pack")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data", n_images=40)


def test_packing_stopped_after_any_file_can_continue(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full after some files. These are not written again."""
    finish = atomic._finish
    written: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_finish", lambda *where: (written.append(where[-1]), finish(*where)))
        pack(data, tmp_path / "whole", dtype="fp32", shard_bytes=400)
    expected = contents(tmp_path / "whole")
    assert written[-1] == "store.json"
    assert len(written) > 15
    for stop in range(len(written)):
        store = tmp_path / f"store{stop}"
        count = 0

        def failing(*where: Any, stop: int = stop) -> None:
            nonlocal count
            count += 1
            if count > stop:
                raise OSError(28, "No space left on device")
            finish(*where)

        with monkeypatch.context() as patch:
            patch.setattr(atomic, "_finish", failing)
            with pytest.raises(OSError, match="cannot be written: No space left on device"):
                pack(data, store, dtype="fp32", shard_bytes=400)
        before = {path: path.stat().st_mtime_ns for path in store.glob("*-0*.safetensors")}
        noted = (store / "unfinished.json").read_text() if stop else ""
        pack(data, store, dtype="fp32", shard_bytes=400)
        assert contents(store) == expected
        for path, modified in before.items():
            assert (path.stat().st_mtime_ns == modified) == (path.name in noted)


def test_a_check_names_what_is_unfinished(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A store, or the pictures of a finished one."""
    store, message = tmp_path / "store", "an unfinished store; finish it with the same itm-fast data command"
    pack(data, store)
    pictures = store / PICTURES_FOLDER
    pictures.mkdir()
    (pictures / UNFINISHED).write_text("{}")
    assert check_store(store).problems == [Problem("pictures", message)]
    (pictures / MANIFEST).write_text("{")
    (problem,) = check_store(store).problems
    assert problem.file == "pictures"
    assert "store.json" in problem.what
    shutil.rmtree(pictures)
    (store / MANIFEST).rename(store / UNFINISHED)
    assert error(capsys, "data", "check", store) == (1, f"{store}: {message}")


def test_a_full_disk_is_one_error_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    arguments = ["data", "pack", "--data", data, "--out", store, "--dtype", "fp32"]
    with no_file_above(1500):
        status, message = error(capsys, *arguments)
    assert (status, message) == (1, f"{store}/dev-index.safetensors: cannot be written: File too large")
    assert error(capsys, "train", "--data", store, "--out", tmp_path / "run") == (
        1, f"{store}: an unfinished store; finish it with the same itm-fast data command"
    )  # fmt: skip
    assert not list(store.glob(".*"))
    pack(data, store, dtype="fp32")
    pack(data, tmp_path / "whole", dtype="fp32")
    assert contents(store) == contents(tmp_path / "whole")


# Prints a line before each shard and waits for a line of input.
PACKING = """
import importlib, sys
pack = importlib.import_module("itm_fast.data.pack")
write_shard = pack._write_shard
def when_told(*arguments):
    print(flush=True)
    sys.stdin.readline()
    return write_shard(*arguments)
pack._write_shard = when_told
pack.pack(sys.argv[1], sys.argv[2], shard_bytes=1)
"""


def packing(data: Path, store: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PACKING, data, store]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_packing_continues_after_a_kill(data: Path, tmp_path: Path) -> None:
    """Kill packing between the third and the thirteenth of 44 shards; the next call finishes the store."""
    pack(data, tmp_path / "whole", shard_bytes=1)
    expected = contents(tmp_path / "whole")
    assert len([name for name in expected if "-0" in name]) == 44
    store = tmp_path / "store"
    with packing(data, store) as child:
        assert child.stdin is not None
        child.stdin.write(b"\n" * 12)
        child.stdin.flush()
        while child.poll() is None and len(list(store.glob("*-0*.safetensors"))) < 3:
            time.sleep(0.001)
        child.kill()
    assert child.returncode == -signal.SIGKILL
    noted = json.loads((store / "unfinished.json").read_text())["shards"]
    assert 2 <= len(noted) <= 12, "the third may not be noted yet"
    assert not (store / "store.json").exists()
    pack(data, store, shard_bytes=1)
    assert contents(store) == expected


def test_an_unfinished_store_of_other_data_or_settings_is_refused(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with no_file_above(1500), pytest.raises(OSError, match="File too large"):
        pack(data, store, dtype="fp32")
    with pytest.raises(ValueError, match="contains an unfinished store of other data or settings; remove it or choose"):
        pack(data, store, dtype="bf16")
    features = np.load(data / "train_ims.npy")
    np.save(data / "train_ims.npy", features + 1)
    with pytest.raises(ValueError, match="contains an unfinished store of other data or settings; remove it or choose"):
        pack(data, store, dtype="fp32")
    np.save(data / "train_ims.npy", features)
    manifest = pack(data, store, dtype="fp32")
    before = contents(store)
    assert pack(data, store, dtype="fp32") == manifest
    assert contents(store) == before
    with pytest.raises(ValueError, match="contains a feature store of other data or settings; choose another --out"):
        pack(data, store, dtype="bf16")


def test_a_folder_with_other_files_is_refused(data: Path, tmp_path: Path) -> None:
    published = write_data(tmp_path / "published", n_images=3)
    before = contents(published)
    message = f"{published}: expected an empty folder or a feature store, found 'dev_caps.txt'; choose another --out"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pack(data, published)
    assert contents(published) == before
    # Files of a call that was killed before it recorded a shard.
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / ".unfinished.abcd1234.tmp.json").write_text("{")
    pack(data, killed)
    pack(data, tmp_path / "whole")
    assert contents(killed) == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-00001.safetensors", None, "no such file; the store needs it for 8 images"),
        ("train-00001.safetensors", b"x" * 463, "truncated: the store wrote 464 bytes, the file has 463"),
        ("dev-index.safetensors", None, "no such file"),
        ("vocab.json", None, "no such file"),
    ],
)
def test_a_finished_store_with_a_missing_file_is_refused(
    data: Path, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    store = tmp_path / "store"
    pack(data, store, dtype="fp32", shard_bytes=400)
    (store / name).unlink()
    if content is not None:
        (store / name).write_bytes(content)
    expected = f"{store / name}: {message}; remove {store} and pack again"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        pack(data, store, dtype="fp32", shard_bytes=400)


def interrupted(data: Path, store: Path) -> None:
    """Leave a store with records of all shards and without a manifest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_format, "write_manifest", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space left"):
            pack(data, store, dtype="fp32", shard_bytes=400)


def test_a_damaged_shard_of_an_unfinished_store_is_written_again(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    interrupted(data, store)
    shards = sorted(store.glob("*-0*.safetensors"))
    before = {path: path.stat().st_mtime_ns for path in shards}
    content = bytearray(shards[1].read_bytes())
    content[-1] ^= 1
    shards[1].write_bytes(content)
    os.utime(shards[1], ns=(1, 1))
    pack(data, store, dtype="fp32", shard_bytes=400)
    assert [path for path in shards if path.stat().st_mtime_ns == before[path]] == [shards[0], *shards[2:]]
    pack(data, tmp_path / "whole", dtype="fp32", shard_bytes=400)
    assert contents(store) == contents(tmp_path / "whole")


def test_features_changed_after_an_interruption_are_packed_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of samples of a large file does not detect the change."""
    monkeypatch.setattr(digests, "_BLOCKS", 1)
    monkeypatch.setattr(digests, "_BLOCK_BYTES", 128)
    store, path = tmp_path / "store", data / "train_ims.npy"
    interrupted(data, store)
    before = {path.name: path.stat().st_mtime_ns for path in store.glob("*-0*.safetensors")}
    with path.open("rb+") as file:
        file.seek(200)
        file.write(np.float32(1000).tobytes())
    with pytest.warns(UserWarning, match=f"^{re.escape(str(path))}: changed since packing was interrupted; its shards"):
        pack(data, store, dtype="fp32", shard_bytes=400)
    kept = {name.split("-")[0] for name, time in before.items() if (store / name).stat().st_mtime_ns == time}
    assert kept == {"dev"}
    pack(data, tmp_path / "whole", dtype="fp32", shard_bytes=400)
    assert contents(store) == contents(tmp_path / "whole")


@pytest.mark.parametrize("field", ["images", "bytes", "sha256"])
def test_notes_with_wrong_types_are_refused(data: Path, tmp_path: Path, field: str) -> None:
    store = tmp_path / "store"
    interrupted(data, store)
    notes = json.loads((store / "unfinished.json").read_text())
    notes["shards"][0][field] = [notes["shards"][0][field]]
    (store / "unfinished.json").write_text(json.dumps(notes))
    message = f"{store / 'unfinished.json'}: damaged; remove {store} or choose another --out"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pack(data, store, dtype="fp32", shard_bytes=400)


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_source_that_changes_while_it_is_packed_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_time: bool
) -> None:
    """The change is found by the file's times, or by its digest if its times are reset."""
    store, path = tmp_path / "store", data / "train_ims.npy"
    features, state = np.load(path), path.stat()
    write_shard = pack_module._write_shard

    def changing(source: PrecomputedDataset, shard: Path, *arguments: Any) -> ShardRecord:
        record = write_shard(source, shard, *arguments)
        if shard.name == "train-00001.safetensors":
            with path.open("rb+") as file:
                file.seek(-4, os.SEEK_END)
                file.write((features[-1, -1, -1] + 1).tobytes())
            if keep_time:
                os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
            else:
                np.save(path, features)
        return record

    monkeypatch.setattr(pack_module, "_write_shard", changing)
    message = f"{path}: changed while it was packed; remove {store} and pack again"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pack(data, store, dtype="fp32", shard_bytes=400)
    noted = json.loads((store / "unfinished.json").read_text())["shards"]
    assert {shard["file"].split("-")[0] for shard in noted} == {"dev"}
    assert not (store / "store.json").exists()


@pytest.mark.parametrize("name", ["train_caps.txt", "train_ids.txt"])
@pytest.mark.parametrize("how", ["written", "removed"])
def test_captions_that_change_while_they_are_packed_are_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    """The store would contain the first content, but its source has changed."""
    store, path = tmp_path / "store", data / name
    (data / "train_ids.txt").write_text("".join(f"image {number}\n" for number in range(40)))
    write_shard = pack_module._write_shard

    def changing(source: PrecomputedDataset, shard: Path, *arguments: Any) -> ShardRecord:
        if shard.name == "train-00001.safetensors":
            if how == "written":
                path.write_text(path.read_text().replace("0", "9", 1))
            else:
                path.unlink()
        return write_shard(source, shard, *arguments)

    monkeypatch.setattr(pack_module, "_write_shard", changing)
    message = f"{path}: changed while it was packed; remove {store} and pack again"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pack(data, store, dtype="fp32", shard_bytes=400)
    assert not (store / "store.json").exists()


def test_two_packings_into_one_folder_are_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is refused with the process id of the first. After the first is killed, packing continues."""
    store = tmp_path / "store"
    with packing(data, store) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"\n"
        before = contents(store)
        holder = f"process {first.pid} on {socket.gethostname()}"
        expected = f"{store}: {holder} is packing there; wait until it ends or choose another --out"
        assert error(capsys, "data", "pack", "--data", data, "--out", store) == (1, expected)
        assert contents(store) == before
        first.kill()
    assert (store / "packing.lock").exists()
    pack(data, store, shard_bytes=1)
    pack(data, tmp_path / "whole", shard_bytes=1)
    assert contents(store) == contents(tmp_path / "whole")
    assert not (store / "packing.lock").exists()


def test_a_lock_file_removed_while_waiting_is_locked_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may remove its lock file after another has opened it and before it is locked: open it again."""
    path, acquire, opened = tmp_path / "lock", lock._acquire, list[int]()

    def late(handle: int, *messages: Any) -> None:
        opened.append(os.fstat(handle).st_ino)
        if len(opened) == 1:
            path.unlink()
            path.with_suffix(".new").write_text("")
            path.with_suffix(".new").rename(path)
        acquire(handle, *messages)

    monkeypatch.setattr(lock, "_acquire", late)
    with lock.hold(path, refusal=str, warning=str, temporary=True):
        assert opened[0] != opened[1] == path.stat().st_ino
        assert path.read_text().split() == [str(os.getpid()), "on", socket.gethostname()]
    assert not path.exists()


# Not ru_maxrss, which a process takes over from the one that started it.
MEMORY = """
import sys
from itm_fast.benchmarking.measure import status_bytes
from itm_fast.data import pack
before = status_bytes("VmHWM")
pack(sys.argv[1], sys.argv[2], dtype="bf16", splits=["train"], shard_bytes=2**25)
print((status_bytes("VmHWM") - before) // 1024)
"""


@pytest.mark.thorough
def test_the_memory_of_packing_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """With sparse files of 300 and 600 MB, the peaks differ by less than 100 MB."""
    peaks = []
    for images in (1024, 2048):
        data, shape = write_data(tmp_path / f"data{images}"), (images, 36, 2048)
        with (data / "train_ims.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            file.truncate(file.tell() + 4 * int(np.prod(shape)))
        (data / "train_caps.txt").write_text("image\n" * 5 * images)
        store = tmp_path / f"store{images}"
        done = run_process([sys.executable, "-c", MEMORY, data, store], cwd=ROOT, OMP_NUM_THREADS=1)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert max(peaks) < 200_000, "kilobytes above what the imports took"
    assert peaks[1] - peaks[0] < 100_000, "kilobytes for 300 MB more"
