"""Packing that is interrupted, killed, or meets a full disk: what is written is kept, and the end is the same."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import error
from helpers.full_disk import no_file_above
from helpers.processes import ROOT
from helpers.processes import run as run_process
from test_full_disk import contents
from test_store import write_data

from itm_fast import files
from itm_fast.data import pack


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data", n_images=40)


def test_a_packing_stopped_after_any_file_is_taken_up(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes so many files and then no more; what is there is not written again."""
    finish = files._finish
    written: list[Path] = []
    with monkeypatch.context() as patch:
        patch.setattr(files, "_finish", lambda temporary, target: (written.append(target), finish(temporary, target)))
        pack(data, tmp_path / "whole", dtype="fp32", shard_bytes=400)
    expected = contents(tmp_path / "whole")
    assert written[-1].name == "store.json"
    assert len(written) > 15
    for stop in range(len(written)):
        store = tmp_path / f"store{stop}"
        count = 0

        def failing(temporary: Path, target: Path, stop: int = stop) -> None:
            nonlocal count
            count += 1
            if count > stop:
                raise OSError(28, "No space left on device")
            finish(temporary, target)

        with monkeypatch.context() as patch:
            patch.setattr(files, "_finish", failing)
            with pytest.raises(OSError, match="cannot be written: No space left on device"):
                pack(data, store, dtype="fp32", shard_bytes=400)
        before = {path: path.stat().st_mtime_ns for path in store.glob("*-0*.safetensors")}
        noted = (store / "unfinished.json").read_text() if stop else ""
        pack(data, store, dtype="fp32", shard_bytes=400)
        assert contents(store) == expected
        for path, modified in before.items():
            assert (path.stat().st_mtime_ns == modified) == (path.name in noted)


def test_a_full_disk_says_so_in_one_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    arguments = ["data", "pack", "--data", data, "--out", store, "--dtype", "fp32"]
    with no_file_above(1500):
        status, message = error(capsys, *arguments)
    assert (status, message) == (1, f"{store}/dev-index.safetensors: cannot be written: File too large")
    assert error(capsys, "train", "--data", store, "--out", tmp_path / "run") == (
        1, f"{store}: an unfinished feature store; finish it with itm-fast data pack"
    )  # fmt: skip
    assert not list(store.glob(".*"))
    pack(data, store, dtype="fp32")
    pack(data, tmp_path / "whole", dtype="fp32")
    assert contents(store) == contents(tmp_path / "whole")


def test_killed_while_packing(data: Path, tmp_path: Path) -> None:
    """SIGKILL at any moment leaves what a further call finishes."""
    pack(data, tmp_path / "whole", shard_bytes=200)
    expected = contents(tmp_path / "whole")
    random = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
    store = tmp_path / "store"
    kills = 0
    while kills < 8:
        child = os.fork()
        if not child:
            pack(data, store, shard_bytes=200)
            os._exit(0)
        time.sleep(random.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            kills += 1
        else:
            assert contents(store) == expected
            store = tmp_path / f"store{kills}"
    pack(data, store, shard_bytes=200)
    assert contents(store) == expected


def test_an_unfinished_store_of_other_data_or_settings_is_refused(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with no_file_above(1500), pytest.raises(OSError, match="File too large"):
        pack(data, store, dtype="fp32")
    with pytest.raises(ValueError, match="holds an unfinished store of other data or settings; remove it or choose"):
        pack(data, store, dtype="bf16")
    features = np.load(data / "train_ims.npy")
    np.save(data / "train_ims.npy", features + 1)
    with pytest.raises(ValueError, match="holds an unfinished store of other data or settings; remove it or choose"):
        pack(data, store, dtype="fp32")
    np.save(data / "train_ims.npy", features)
    manifest = pack(data, store, dtype="fp32")
    before = contents(store)
    assert pack(data, store, dtype="fp32") == manifest
    assert contents(store) == before
    with pytest.raises(ValueError, match="holds a feature store of other data or settings; choose another --out"):
        pack(data, store, dtype="bf16")


MEMORY = """
import resource, sys
from itm_fast.data import pack
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pack(sys.argv[1], sys.argv[2], dtype="bf16", splits=["train"], shard_bytes=2**25)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_the_memory_of_packing_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """A file of 300 MB that takes no room on the disk."""
    data = write_data(tmp_path / "data")
    shape = (1024, 36, 2048)
    with (data / "train_ims.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        file.truncate(file.tell() + 4 * int(np.prod(shape)))
    (data / "train_caps.txt").write_text("image\n" * 5 * shape[0])
    done = run_process([sys.executable, "-c", MEMORY, data, tmp_path / "store"], cwd=ROOT, OMP_NUM_THREADS=1)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100_000, "kilobytes above what the imports took"
