"""The data fingerprint that a resumed run compares, and how little it reads of large files."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from itm_fast.data import digests


def features(path: Path, rows: int) -> int:
    """Write rows of 1,000 float32 numbers and return the size of the file."""
    np.save(path, np.random.default_rng(0).standard_normal((rows, 10, 100)).astype(np.float32))
    return path.stat().st_size


def flip(path: Path, position: int) -> None:
    with path.open("rb+") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def test_every_byte_of_a_small_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_BLOCK_BYTES", 1 << 10)
    path = tmp_path / "f.npy"
    size = features(path, 50)
    assert size <= 256 * 1024
    digest = digests.sampled_sha256(path)
    for position in [0, 1, size - 1, *np.random.default_rng(1).integers(0, size, 50).tolist()]:
        flip(path, position)
        assert digests.sampled_sha256(path) != digest, position
        flip(path, position)
    assert digests.sampled_sha256(path) == digest


def test_of_a_large_file_blocks_from_its_first_to_its_last_byte_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(digests, "_BLOCKS", 32)
    path = tmp_path / "f.npy"
    size = features(path, 10)
    digest = digests.sampled_sha256(path)
    noticed = []
    for position in range(0, size, 61):
        flip(path, position)
        noticed.append(digests.sampled_sha256(path) != digest)
        flip(path, position)
    assert sum(noticed) / len(noticed) == pytest.approx(32 * 64 / size, rel=0.1)
    gaps = np.diff(np.flatnonzero(noticed)) * 61
    assert size / 31 - 2 * 64 < gaps.max() < size / 31 + 2 * 64, "the blocks are spread over the file"
    for position in (0, 63, size - 1, size - 64):
        flip(path, position)
        assert digests.sampled_sha256(path) != digest
        flip(path, position)


def test_size_counts_and_times_and_names_do_not(tmp_path: Path) -> None:
    path = tmp_path / "f.npy"
    size = features(path, 20)
    digest = digests.sampled_sha256(path)
    other = shutil.copy(path, tmp_path / "other.npy")
    os.utime(other, (1, 1))
    assert digests.sampled_sha256(other) == digest
    os.truncate(other, size - 1)
    assert digests.sampled_sha256(other) != digest
    (tmp_path / "empty").write_bytes(b"")
    assert digests.sampled_sha256(tmp_path / "empty") != digest


def test_little_of_a_file_of_33_gigabytes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has COCO's size, but its zeros take no space on the disk."""
    path = tmp_path / "f.npy"
    path.touch()
    os.truncate(path, 33 * 10**9)
    opened: list[io.BufferedReader] = []
    taken = 0

    class Counting(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            nonlocal taken
            content = super().read(size)
            taken += len(content)
            return content

    def counting(path: Path) -> io.BufferedReader:
        opened.append(Counting(io.FileIO(path)))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(digests.regular, "open_file", counting)
        before = digests.sampled_sha256(path)
    assert taken == 256 * 65536 == 16 * 2**20
    with path.open("rb+") as file:
        file.seek(33 * 10**9 - 5)
        file.write(b"x")
    assert digests.sampled_sha256(path) != before
