"""An index survives kills, a second writer, flipped bits and a full disk."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from itm_fast.data import CaptionDataset
from itm_fast.search import Index, check
from itm_fast.search import checking as checking_module
from itm_fast.search import segments as segments_module
from itm_fast.search import snapshot as snapshot_module
from itm_fast.search.writing import locked
from python_tests.helpers.commands import error
from python_tests.helpers.full_disk import no_file_above
from python_tests.helpers.processes import ROOT
from python_tests.helpers.processes import run as run_process
from python_tests.helpers.search import concepts, files_of, scan


@pytest.fixture(scope="module")
def train(data: Path) -> CaptionDataset:
    return concepts(data)


@pytest.fixture(scope="module")
def built(train: CaptionDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "index"
    Index.build(scan(), train, path)
    return path


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.thorough)])
def test_a_killed_change_happened_or_did_not(data: Path, tmp_path: Path, kills: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    arguments = ["-m", "python_tests.search.kills", data, tmp_path, kills, seed]
    done = run_process([sys.executable, *arguments], cwd=ROOT, PYTHONPATH=ROOT, OMP_NUM_THREADS=1)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    found = json.loads(done.stdout)
    # A change makes a few calls more or less each time, so a kill close to the end may miss it.
    assert sum(found["killed"].values()) > kills // 2, f"seed {seed}: {found}"


def test_a_second_writer_is_told(train: CaptionDataset, built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = Index.open(built, scan())
    before = index.manifest
    message = rf"{re.escape(str(built))}: process {os.getpid()} on \S+ is changing this index; try again when it has"
    with locked(built):
        for change in (
            lambda: index.add(np.asarray(train.features)[:1], ids=["new"]),
            lambda: index.delete(["train0"]),
            index.compact,
            lambda: index.set_candidates(3),
            lambda: Index.build(scan(), train, built, overwrite=True),
        ):
            with pytest.raises(ValueError, match=message):
                change()
        assert index.search("red", 1)
        status, text = error(capsys, "index", "delete", built, "train0")
        assert (status, bool(re.match(message, text))) == (1, True)
    assert Index.open(built).manifest == before


def test_every_flipped_bit_is_found(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(built) == []
    chosen = random.Random(0)
    names = sorted(file.name for file in built.glob("*.safetensors"))
    assert [name.partition("-")[0] for name in names] == ["captions", "images", "pooling"]
    for name in names:
        for _ in range(8):
            copy = tmp_path / "copy"
            shutil.copytree(built, copy)
            content = bytearray((copy / name).read_bytes())
            content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
            (copy / name).write_bytes(content)
            assert check(copy) == [f"{copy / name}: damaged: its content does not match its checksum"]
            shutil.rmtree(copy)
    shutil.copytree(built, tmp_path / "copy")
    (tmp_path / "copy" / names[0]).unlink()
    capsys.readouterr()
    status, message = error(capsys, "search", tmp_path / "copy", "red")
    assert (status, message) == (1, f"{tmp_path / 'copy' / names[0]}: no such file; the index needs it")


def problem_of(path: Path) -> str:
    try:
        Index.open(path)
    except ValueError as error:
        return str(error)
    return ""


def test_a_change_during_a_check_is_no_damage(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change removes files that the check is about to read; the new state is checked, and its damage is found."""
    path = shutil.copytree(built, tmp_path / "index")
    index, digest = Index.open(path, scan()), checking_module.sha256_of_file
    changes = ["train0", "train1"]

    def changing(file: Path, update: Callable[[int], object]) -> str:
        if changes:
            index.delete([changes.pop()])
            index.compact()
        return digest(file, update)

    monkeypatch.setattr(checking_module, "sha256_of_file", changing)
    assert check(path) == []
    assert changes == []
    changes += [f"train{number}" for number in range(2, 20)]
    with pytest.raises(ValueError, match="the index changed 5 times during the check; try again later"):
        check(path)
    file = next(path.glob("images-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    changes.clear()
    assert check(path) == [f"{file}: damaged: its content does not match its checksum"]


@pytest.mark.parametrize("kind", ["64x5", "16x0", "0x4", "0x0", "224", "foo"])
def test_a_way_to_make_features_that_does_not_exist_is_refused_first(
    train: CaptionDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    expected = (
        "preprocessing: expected emoji, or SIDExGRID with a multiple of GRID as SIDE, such as 224x14, got " + repr(kind)
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        Index.build(scan(), train, tmp_path / "index", preprocessing=kind)
    arguments = ["index", "build", "--checkpoint", tmp_path, "--pictures", tmp_path, "--out", tmp_path / "index"]
    assert error(capsys, *arguments, "--preprocessing", kind) == (1, expected)
    assert not (tmp_path / "index").exists()


def test_a_damaged_manifest_or_segment_is_one_line(built: Path, tmp_path: Path) -> None:
    chosen = random.Random(1)
    original = (built / "index.json").read_bytes()
    copy = tmp_path / "copy"
    shutil.copytree(built, copy)
    for _ in range(60):
        content = bytearray(original)
        place = chosen.randrange(len(content))
        content[place] ^= 1 << chosen.randrange(8)
        (copy / "index.json").write_bytes(content)
        message = problem_of(copy)
        # White space may change without a change of the values.
        assert "\n" not in message
        assert message.startswith(str(copy)) or Index.open(copy).manifest == Index.open(built).manifest
    (copy / "index.json").write_bytes(original)
    segment = next(copy.glob("images-*"))
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"the index wrote {len(whole):,} bytes, the file has {len(whole) - 1:,}"):
        Index.open(copy)
    segment.write_bytes(b"\xff" * 8 + whole[8:])
    with pytest.raises(ValueError, match=re.escape(f"{segment}: not a readable segment (")):
        Index.open(copy)
    (copy / "index.json").write_text(json.dumps({**json.loads(original), "format_version": 2}))
    with pytest.raises(ValueError, match="format_version 2 is newer than 1"):
        Index.open(copy)


def test_a_damaged_index_is_overwritten(built: Path, train: CaptionDataset, tmp_path: Path) -> None:
    path = shutil.copytree(built, tmp_path / "copy")
    (path / "index.json").write_text("{")
    files = {file.name for file in path.glob("*.safetensors")}

    def build() -> Index:
        return Index.build(scan(), train, path, overwrite=True, pooling="mean")

    with pytest.raises(ValueError, match=re.escape(f"{path / 'index.json'}: ")):
        Index.build(scan(), train, path, pooling="mean")
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"copy: expected a new or empty folder, found 'notes\.txt'"):
        build()
    (path / "notes.txt").unlink()
    with no_file_above(500), pytest.raises(OSError, match=r"cannot be written: File too large"):
        build()
    # The files of the damaged index stay until the new one is complete.
    assert files <= {file.name for file in path.iterdir()}
    assert build().search("red ball", 1)
    assert check(path) == []
    assert not files & {file.name for file in path.iterdir()}


def test_a_manifest_that_could_not_be_read_again_is_not_written(train: CaptionDataset, tmp_path: Path) -> None:
    runs = tmp_path / "run", tmp_path / "run\udce9"
    for run in runs:
        scan().save(run)
    path = tmp_path / "index"
    before = Index.build(runs[0], train, path).manifest
    encoder = f"encoder -1 patches {'0' * 64} /vit"
    for run, kind, place in ((runs[1], None, rf"checkpoint: {tmp_path}/run\udce9"),
                             (runs[0], f"{encoder}\udce9", rf"preprocessing: {encoder}\udce9")):  # fmt: skip
        message = f"{place}: an index cannot name a path that is not UTF-8; rename it"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            Index.build(run, train, path, preprocessing=kind, overwrite=True)
    message = f"{path / 'index.json'}: not a readable manifest of an index (ValueError('candidates: {2**53}'))"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Index.open(path).set_candidates(2**53)
    assert check(path) == []
    assert Index.open(path).manifest == before


def test_a_full_disk_leaves_the_index_as_it_was(built: Path, train: CaptionDataset, tmp_path: Path) -> None:
    path = tmp_path / "index"
    shutil.copytree(built, path)
    index = Index.open(path, scan())
    before = index.search("red ball", 24)
    for change in (
        lambda: index.add(np.asarray(train.features)[:20], ids=[f"new{number}" for number in range(20)]),
        lambda: index.delete(["train0"]),
        lambda: Index.build(scan(), train, path, overwrite=True, pooling="mean"),
    ):
        with no_file_above(500), pytest.raises(OSError, match=r"cannot be written: File too large"):
            change()
        assert check(path) == []
        assert Index.open(path, scan()).search("red ball", 24) == before
    index.delete(["train0"])
    assert not files_of(path)
    before = index.search("red ball", 23)
    with no_file_above(500), pytest.raises(OSError, match="cannot be written: File too large"):
        index.compact()
    assert check(path) == []
    assert Index.open(path, scan()).search("red ball", 23) == before
    with no_file_above(500), pytest.raises(OSError, match="cannot be written: File too large"):
        Index.build(scan(), train, tmp_path / "other", pooling="mean")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'other' / 'index.json'}: no such file, so")):
        Index.open(tmp_path / "other")
    Index.build(scan(), train, tmp_path / "other", pooling="mean")
    assert not files_of(tmp_path / "other")


@pytest.mark.parametrize(
    ("rounds", "each"), [(50, 100), pytest.param(5000, 1, marks=pytest.mark.thorough)], ids=["50 x 100", "5000 x 1"]
)
def test_ten_thousand_adds_and_deletes_leave_no_garbage(
    train: CaptionDataset, tmp_path: Path, rounds: int, each: int
) -> None:
    """5,000 items are added and deleted again, in many small changes; the index is then as small as a new one."""
    features = torch.from_numpy(np.asarray(train.features))
    index = Index.build(scan(), features, tmp_path / "index", ids=[f"kept {number}" for number in range(24)])
    first, before = index.info(), index.search("red ball", 24)
    more = features.repeat(5, 1, 1)[:each]
    descriptors, sizes = len(list(Path("/proc/self/fd").iterdir())), []
    for number in range(rounds):
        index.add(more, ids=[f"{number} {place}" for place in range(each)])
        assert index.delete([f"{number} {place}" for place in range(each)]) == each
        sizes.append(sum(file.stat().st_size for file in index.path.iterdir()))
    assert index.info()["generation"] == 1 + 2 * rounds
    assert max(sizes) < 2 * first["bytes"] + 6 * each * first["bytes"] / 24, "deleted items do not pile up"
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors + 1
    assert not files_of(index.path)
    assert check(index.path) == []
    index.compact()
    compacted = index.info()
    assert {**compacted, "generation": 1} == first
    assert index.search("red ball", 24) == before


def test_mapped_pages_are_released(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(4 * 2**20, dtype=torch.float32).view(-1, 1024)
    record = segments_module.write_tensors(tmp_path, "images", {"values": values, "none": values[:0]})
    mapped = segments_module.map_file(tmp_path, record)
    assert torch.equal(mapped.tensors["values"], values)
    assert mapped.tensors["none"].shape == (0, 1024)
    assert resident(record.file) >= values.nbytes
    mapped.release()
    assert resident(record.file) == 0
    assert torch.equal(mapped.tensors["values"], values)
    pooled = values + 1
    record = segments_module.write_tensors(tmp_path, "images", {"pooled": pooled, "a": values, "z": values.clone()})
    mapped = segments_module.map_file(tmp_path, record)
    assert all(bool(one.sum() > 0) for one in mapped.tensors.values())
    mapped.release(["pooled"])
    # The tensors share a page with their neighbours, and perhaps a huge page of 2 MiB, which is released as a whole.
    assert pooled.nbytes - 2 * 2**21 <= resident(record.file) <= pooled.nbytes + 2 * mmap.PAGESIZE
    assert torch.equal(mapped.tensors["pooled"], pooled)

    before = Index.open(built, scan()).search("red ball", 24, of="images")
    monkeypatch.setattr(snapshot_module, "_WHOLE", 1)
    monkeypatch.setattr(snapshot_module, "_MAPPED", 1)
    released = []
    monkeypatch.setattr(snapshot_module.Segment, "release", lambda segment: released.append(segment))
    assert Index.open(built, scan()).search("red ball", 24, of="images") == before
    assert released


def test_rows_of_a_large_index_are_read_one_by_one(tmp_path: Path) -> None:
    """The system maps only the rows that are used and some around them, not the rest of 16 MiB."""
    values = torch.arange(4 * 2**20, dtype=torch.float32).view(-1, 1024)
    pooled = torch.ones(2**20)
    record = segments_module.write_tensors(tmp_path, "images", {"pooled": pooled, "values": values})
    with (tmp_path / record.file).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = segments_module.map_file(tmp_path, record)
    mapped.scatter(["pooled"])
    # Flags of madvise: rr is random reads, nh no huge pages.
    advised = [size for size, flags in areas(record.file) if {"rr", "nh"} <= flags]
    assert values.nbytes - 2 * mmap.PAGESIZE <= sum(advised) <= values.nbytes + 2 * mmap.PAGESIZE
    mapped.fetch("values", torch.tensor([5, 9, 11, 4095]), torch.tensor([9, 11, 11, 4096]))
    mapped.fetch("values", torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert torch.equal(mapped.tensors["values"][[2000, 5, 4095]], values[[2000, 5, 4095]])
    assert resident(record.file) < 2**20


def areas(name: str) -> list[tuple[int, set[str]]]:
    """Return the size in bytes and the flags of each mapped area of a file."""
    found: list[tuple[int, set[str]]] = []
    own = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-", line):
            own = line.endswith(name)
        elif own and line.startswith("Size:"):
            found.append((1024 * int(line.split()[1]), set()))
        elif own and line.startswith("VmFlags:"):
            found[-1][1].update(line.split()[1:])
    return found


def resident(name: str) -> int:
    """Return the bytes of a mapped file that are in the memory of this process."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.endswith(name)]
    return sum(
        1024 * int(next(line for line in lines[first:] if line.startswith("Rss:")).split()[1]) for first in starts
    )


def test_links_are_not_followed_for_writing(train: CaptionDataset, tmp_path: Path) -> None:
    path = tmp_path / "index"
    index = Index.build(scan(), train, path, pooling="mean")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    content = (path / "index.json").read_bytes()
    (path / "index.json").unlink()
    (tmp_path / "moved.json").write_bytes(content)
    (path / "index.json").symlink_to(tmp_path / "moved.json")
    with pytest.raises(ValueError, match="is a symbolic link, which is not followed for writing"):
        index.delete(["train0"])
    assert (tmp_path / "moved.json").read_bytes() == content


def test_sizes_that_do_not_fit_are_refused_when_the_index_is_opened(built: Path, tmp_path: Path) -> None:
    """A segment with a right checksum may still be wrong: one that somebody wrote so."""
    path = tmp_path / "index"
    shutil.copytree(built, path)
    manifest = Index.open(path).manifest
    record = manifest.segments[0]
    # Copies: the file is written again below.
    stored = {name: one.clone() for name, one in segments_module.map_file(path, record).tensors.items()}
    for name, change, problem in (
        ("0.offsets", lambda one: one + 1, "0.offsets"),
        ("0.offsets", lambda one: one.flip(0), "0.offsets"),
        ("0.values", lambda one: one.flatten(), "0.values"),
        ("ids.ends", lambda one: one[:-1], "ids.ends"),
        ("pooled", lambda one: one[:-1], "pooled has another number of items"),
    ):
        content = save({key: (change(one) if key == name else one).contiguous() for key, one in stored.items()})
        (path / record.file).write_bytes(content)
        changed = [{**segment} for segment in json.loads((path / "index.json").read_text())["segments"]]
        changed[0]["bytes"] = len(content)
        whole = {**json.loads((built / "index.json").read_text()), "segments": changed}
        whole.pop("digest")
        digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
        (path / "index.json").write_text(json.dumps({**whole, "digest": digest}))
        with pytest.raises(ValueError, match=re.escape(f"{path / record.file}: damaged: {problem}")):
            Index.open(path)
