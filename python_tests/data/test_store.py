"""Feature stores: the same batches as the published layout, and clear errors for changed files."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import resource
import threading
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from itm_fast import cli
from itm_fast.data import (
    BatchLoader,
    EpochSampler,
    PrecomputedDataset,
    StoreDataset,
    Vocabulary,
    open_split,
    pack,
    pack_notes,
    reader,
    store_format,
)
from itm_fast.data.features import ArrayFeatures
from itm_fast.data.layout import available_splits
from itm_fast.data.reader import BufferPool
from itm_fast.fragments import Fragments
from python_tests.helpers.commands import error
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.precomputed import VOCABULARY, features_of, write_split
from python_tests.helpers.runs import config, differences, run, same, weights, what_a_run_leaves

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def write_data(folder: Path, n_images: int = 7, **options: object) -> Path:
    """Write train (each image once) and dev (each image five times), with names and the vocabulary."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    write_split(folder, "train", random.standard_normal((n_images, 3, 4)).astype("float32"), 5 * n_images, **options)
    dev = np.repeat(random.standard_normal((4, 3, 4)), 5, axis=0).astype("float32")
    write_split(folder, "dev", dev, 20, ids=[f"image {row // 5}" for row in range(20)])
    VOCABULARY.save(folder / "vocab.json")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


@pytest.fixture(params=["native", "python"])
def either_reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(reader, "_host", lambda: None)
    else:
        assert reader._host() is not None
    return request.param


def assert_same_batches(left: PrecomputedDataset, right: PrecomputedDataset, dtype: torch.dtype) -> None:
    assert (len(left), left.n_images) == (len(right), right.n_images)
    assert (left.captions, left.image_ids) == (right.captions, right.image_ids)
    sampler = EpochSampler(len(left), 8, seed=5)
    batches = list(BatchLoader(left, sampler)), list(BatchLoader(right, sampler))
    assert len(batches[0]) == len(batches[1]) == len(sampler)
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one.features.to(dtype).to(torch.float32), other.features)
        for name in ("token_ids", "lengths", "image_index", "caption_index"):
            assert torch.equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shard_bytes", [1, 100, 1 << 20])
def test_a_store_gives_the_same_batches_as_the_folder(
    data: Path, tmp_path: Path, dtype: str, shard_bytes: int, either_reader: str
) -> None:
    manifest = pack(data, tmp_path / "store", dtype=dtype, shard_bytes=shard_bytes)
    numbers = 48 if dtype == "fp32" else 24
    assert len(manifest.split("train").shards) == {1: 7, 100: -(-7 // (100 // numbers)), 1 << 20: 1}[shard_bytes]
    for split in ("train", "dev"):
        folder, store = PrecomputedDataset(data, split, VOCABULARY), open_split(tmp_path / "store", split, VOCABULARY)
        assert isinstance(store, StoreDataset)
        assert_same_batches(folder, store, TORCH_DTYPES[dtype])
        few = open_split(tmp_path / "store", split, VOCABULARY, max_images=2)
        assert_same_batches(PrecomputedDataset(data, split, VOCABULARY, max_images=2), few, TORCH_DTYPES[dtype])
        assert_same_batches(folder, pickle.loads(pickle.dumps(store)), TORCH_DTYPES[dtype])
    assert not (tmp_path / "store" / "unfinished.json").exists()


def test_shards_are_safetensors_files(data: Path, tmp_path: Path) -> None:
    pack(data, tmp_path / "store", dtype="bf16", shard_bytes=100)
    shards = [load_file(path)["features"] for path in sorted((tmp_path / "store").glob("train-0*"))]
    expected = torch.from_numpy(np.load(data / "train_ims.npy")).to(torch.bfloat16)
    assert torch.equal(torch.cat(shards), expected.flatten(0, 1))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_number_of_two_bytes_is_widened_exactly(dtype: str, tmp_path: Path, either_reader: str) -> None:
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(TORCH_DTYPES[dtype])
    finite = values[values.isfinite()].reshape(-1, 1, 2)
    np.save(tmp_path / "train_ims.npy", finite.to(torch.float32).numpy())
    (tmp_path / "train_caps.txt").write_text("image\n")
    (tmp_path / "train_cap2im.txt").write_text("0\n")
    VOCABULARY.save(tmp_path / "vocab.json")
    pack(tmp_path, tmp_path / "store", dtype=dtype)
    found = open_split(tmp_path / "store", "train", VOCABULARY).image_batch(np.arange(len(finite)))
    assert torch.equal(found.view(torch.int32), finite.to(torch.float32).view(torch.int32))


def test_images_of_fewer_regions(tmp_path: Path, either_reader: str) -> None:
    data = write_data(tmp_path / "data")
    counts = [3, 1, 2, 3, 3, 1, 2]
    (data / "train_regions.txt").write_text("".join(f"{count}\n" for count in counts))
    pack(data, tmp_path / "store", dtype="fp32", shard_bytes=100)
    stored = np.load(data / "train_ims.npy")
    folder, store = (open_split(path, "train", VOCABULARY) for path in (data, tmp_path / "store"))
    assert [store.region_count(image) for image in range(7)] == counts
    for dataset in (folder, store):
        batch = dataset.batch([0, 5, 14, 13, 30])
        assert isinstance(batch.features, Fragments)
        assert batch.features.lengths.tolist() == [3, 1, 2, 2, 2]
        expected = np.concatenate([stored[image, : counts[image]] for image in (0, 1, 2, 2, 6)])
        np.testing.assert_array_equal(batch.features.values.numpy(), expected)
    (data / "train_regions.txt").write_text("3\n" * 6 + "4\n")
    with pytest.raises(ValueError, match=r"regions\.txt: line 7: expected a number of regions from 1 to 3, got '4'"):
        PrecomputedDataset(data, "train", VOCABULARY)


@pytest.mark.parametrize("kind", [">f2", ">f4", ">f8"])
def test_features_in_the_other_byte_order(data: Path, tmp_path: Path, kind: str) -> None:
    values = features_of(7)
    np.save(data / "train_ims.npy", values.astype(kind))
    pack(data, tmp_path / "store", dtype="fp32", splits=["train"])
    assert torch.equal(
        load_file(tmp_path / "store" / "train-00000.safetensors")["features"], torch.from_numpy(values).flatten(0, 1)
    )


def test_captions_of_another_vocabulary_are_tokenised_anew(data: Path, tmp_path: Path) -> None:
    pack(data, tmp_path / "store")
    masked = VOCABULARY.with_mask()
    other = type(VOCABULARY)([*VOCABULARY.words[:4], "caption", "."])
    for vocabulary in (VOCABULARY, masked, other):
        folder, store = (open_split(path, "train", vocabulary) for path in (data, tmp_path / "store"))
        assert torch.equal(folder.token_ids, store.token_ids)
        assert torch.equal(folder.caption_lengths, store.caption_lengths)
    assert not torch.equal(open_split(data, "train", other).token_ids, open_split(data, "train", masked).token_ids)

    class Kept(Vocabulary):
        """The tokenizer of another package."""

        saveable = False

        def to_json(self) -> str:
            raise ValueError("kept elsewhere")

    folder, store = (open_split(path, "train", Kept(other.words)) for path in (data, tmp_path / "store"))
    assert torch.equal(folder.token_ids, store.token_ids)


def test_training_is_the_same_from_a_store_and_resumes_from_either(tmp_path: Path) -> None:
    data = write_concepts(tmp_path / "data")
    pack(data, tmp_path / "store", dtype="fp32", shard_bytes=500)
    run(config(data, tmp_path / "folder"))
    run(config(tmp_path / "store", tmp_path / "packed"))
    whole = what_a_run_leaves(tmp_path / "folder")
    assert "data" in whole["settings"][0]

    def without_data(left: dict[str, object]) -> dict[str, object]:
        return {**left, "settings": [line for line in left["settings"] if not line.startswith("data:")]}

    assert not differences(without_data(whole), without_data(what_a_run_leaves(tmp_path / "packed")))
    # Half of it from the folder, the other half from the store.
    run(config(data, tmp_path / "both", epochs=1))
    run(config(tmp_path / "store", tmp_path / "both"), resume=True)
    assert same(weights(tmp_path / "both"), weights(tmp_path / "folder"))


def test_a_store_of_other_data_is_refused(tmp_path: Path) -> None:
    data = write_concepts(tmp_path / "data")
    pack(write_concepts(tmp_path / "others", seed=1), tmp_path / "store", dtype="fp32")
    pack(data, tmp_path / "rounded", dtype="bf16")
    run(config(data, tmp_path / "run", epochs=1))
    for store, name in (("store", "train_caps.txt"), ("rounded", "train_ims.npy")):
        with pytest.raises(ValueError, match="to resume") as caught:
            run(config(tmp_path / store, tmp_path / "run"), resume=True)
        state = tmp_path / "run" / "last" / "checkpoint.pt"
        assert str(caught.value) == f"{name}: its content is not what the run to resume was started with ({state})"


def damaged(store: Path, name: str, damage: str) -> None:
    path = store / name
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    else:
        with path.open("rb+") as file:
            file.seek(3 if damage == "header" else path.stat().st_size - 1)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train-00001.safetensors", "missing", "no such file; the store needs it for 3 images"),
        ("train-00001.safetensors", "truncated", "truncated: the store wrote 152 bytes, the file has 151"),
        ("train-00001.safetensors", "header", "not the shard that the store wrote: its size or its header differs"),
        ("train-index.safetensors", "missing", "no such file"),
        ("train-index.safetensors", "bit", "damaged: its checksum is not that of the store"),
    ],
)
def test_changed_files_of_a_store_are_refused(data: Path, tmp_path: Path, name: str, damage: str, message: str) -> None:
    store = tmp_path / "store"
    pack(data, store, shard_bytes=100)
    damaged(store, name, damage)
    with pytest.raises(ValueError, match=f"^{re.escape(str(store / name))}: {re.escape(message)}$"):
        open_split(store, "train", VOCABULARY)
    open_split(store, "dev", VOCABULARY)


def test_a_flipped_bit_of_a_shard_is_found_by_the_check(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    assert cli.run(["data", "pack", "--data", str(data), "--out", str(store), "--dtype", "fp32"]) == 0
    assert "train: 7 images, 35 captions, 0.00 GB in 1 shards" in capsys.readouterr().out
    assert cli.run(["data", "check", str(store)]) == 0
    assert f"{store}: no problems found" in capsys.readouterr().out
    damaged(store, "dev-00000.safetensors", "bit")
    report = tmp_path / "report.json"
    assert cli.run(["data", "check", str(store), "--json", str(report)]) == 1
    assert "its checksum is not that" in " ".join(capsys.readouterr().out.split())
    [problem] = json.loads(report.read_text())["problems"]
    assert problem["file"] == "dev-00000.safetensors"
    assert problem["what"] == "damaged: its checksum is not that of the store"
    assert cli.run(["data", "check", str(store), "--split", "train"]) == 0


def replaced(path: Path) -> None:
    content = path.read_bytes()
    path.rename(path.with_name("elsewhere"))
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["touched", "replaced", "removed"])
def test_a_shard_that_changes_while_it_is_used_is_refused(
    data: Path, tmp_path: Path, how: str, either_reader: str
) -> None:
    store = tmp_path / "store"
    pack(data, store, shard_bytes=100)
    dataset = open_split(store, "train", VOCABULARY)
    path = store / "train-00001.safetensors"
    dataset.image_batch([5])
    {"touched": lambda: os.utime(path, ns=(1, 1)), "replaced": lambda: replaced(path), "removed": path.unlink}[how]()
    dataset.image_batch([3])
    message = re.escape(
        f"{path}: row 1 (image 5) cannot be read: the shard was changed or replaced since it was opened"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        dataset.image_batch([6, 0, 5])


def numbered_files(folder: Path, n: int) -> tuple[list[Path], np.ndarray, np.ndarray]:
    """Write files of twelve numbers. Return their paths, the shuffled numbers, and the rows that read them."""
    values = np.random.default_rng(n).standard_normal((3 * n, 4)).astype(np.float32)
    paths = [folder / str(number) for number in range(n)]
    for number, path in enumerate(paths):
        path.write_bytes(values[3 * number : 3 * number + 3].tobytes())
    order = np.random.default_rng(0).permutation(3 * n)
    sizes = np.full(3 * n, 4)
    return paths, values[order].reshape(-1), np.stack([order // 3, order % 3 * 16, sizes, np.arange(3 * n) * 4], axis=1)


@pytest.mark.parametrize("threads", [1, 4])
def test_more_shards_than_open_files_are_read(tmp_path: Path, threads: int, either_reader: str) -> None:
    paths, values, rows = numbered_files(tmp_path, 400)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = reader.ShardReader(paths, [path.stat() for path in paths], "fp32", threads)
    most = len(list(Path("/proc/self/fd").iterdir())) + 300
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        for part in (rows, rows[::-1]):
            buffer = np.zeros_like(values)
            assert opened.gather(part, buffer) == ("", -1, 0)
            np.testing.assert_array_equal(buffer, values)
        assert len(list(Path("/proc/self/fd").iterdir())) < most - 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_files_are_closed_and_changes_of_closed_files_detected(tmp_path: Path) -> None:
    paths, values, rows = numbered_files(tmp_path, 20)
    host = reader._host()
    states = [path.stat() for path in paths]
    files = [(str(path), one.st_size, one.st_mtime_ns, one.st_ino) for path, one in zip(paths, states, strict=True)]
    opened = host.ShardReader(files, "fp32", 3)

    def handles() -> int:
        # Of the folder itself, which is open while it is listed, nothing is left to resolve.
        return sum(tmp_path in one.resolve().parents for one in Path("/proc/self/fd").iterdir())

    buffer = np.zeros_like(values)
    assert opened.gather(rows, buffer, "fp32", 4) == ("", -1, 0)
    np.testing.assert_array_equal(buffer, values)
    assert handles() == 3
    ordered = rows[np.argsort(rows[:, 0], kind="stable")]
    assert opened.gather(ordered, buffer, "fp32", 1) == ("", -1, 0)
    assert handles() == 3
    replaced(paths[1])
    assert opened.gather(ordered, buffer, "fp32", 2) == ("changed", 3, 0)
    paths[0].unlink()
    assert opened.gather(ordered[6:], buffer, "fp32", 2) == ("", -1, 0)
    assert opened.gather(ordered[::-1], buffer, "fp32", 2) == ("changed", 54, 0)
    del opened
    assert handles() == 0


def test_a_forked_process_has_its_own_files_and_lock(tmp_path: Path) -> None:
    """A thread that the child does not have may hold the parent's lock during the fork."""
    paths, values, rows = numbered_files(tmp_path, 3)
    states = [path.stat() for path in paths]
    files = [(str(path), one.st_size, one.st_mtime_ns, one.st_ino) for path, one in zip(paths, states, strict=True)]
    opened = reader._host().ShardReader(files, "fp32", 3)

    def handles() -> int:
        return sum(tmp_path in one.resolve().parents for one in Path("/proc/self/fd").iterdir())

    buffer = np.zeros_like(values)
    assert opened.gather(rows, buffer, "fp32", 1) == ("", -1, 0)
    assert handles() == 3
    child = os.fork()
    if child == 0:
        own = np.zeros_like(values)
        found = [opened.gather(rows, own, "fp32", 1), opened.gather(rows, own, "fp32", 2)]
        # Those of the parent, and its own.
        os._exit(0 if found == [("", -1, 0)] * 2 and np.array_equal(own, values) and handles() == 6 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert handles() == 3


def test_a_mapped_array_is_copied_and_sent_to_other_processes(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.save(tmp_path / "a.npy", array)
    mapped = ArrayFeatures(np.load(tmp_path / "a.npy", mmap_mode="r"), "a.npy")
    for features in (pickle.loads(pickle.dumps(mapped)), copy.deepcopy(mapped), mapped):
        np.testing.assert_array_equal(features.gather(np.array([1, 0])), array[::-1])
        np.testing.assert_array_equal(features.stored(0, 2), array.reshape(6, 4))


def test_a_shard_that_changes_while_a_batch_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, either_reader: str
) -> None:
    """The shard is replaced after it was opened and before its last row is read."""
    path, pipe = tmp_path.resolve() / "shard", tmp_path / "pipe"
    path.write_bytes(bytes(64))
    os.mkfifo(pipe)
    opened = reader.ShardReader([path, pipe], [path.stat(), pipe.stat()], "fp32", 1)
    rows, buffer = np.array([[0, 0, 16, 0], [1, 0, 0, 0]]), np.empty(16, dtype=np.float32)
    if either_reader == "python":
        widened = reader._widened
        monkeypatch.setattr(reader, "_widened", lambda *given: (os.utime(path, ns=(1, 1)), widened(*given))[-1])
        assert opened.gather(rows[:1], buffer) == ("changed", 0, 0)
        return
    over = threading.Event()

    def change() -> None:
        try:
            while path not in [one.resolve() for one in Path("/proc/self/fd").iterdir()] and not over.wait(0.001):
                pass
            os.utime(path, ns=(1, 1))
        finally:
            # The second row has no numbers, but who opens a pipe waits until another one has opened it for writing.
            handle = os.open(pipe, os.O_RDWR)
            over.wait()
            os.close(handle)

    writer = threading.Thread(target=change)
    writer.start()
    found = opened.gather(rows, buffer)
    over.set()
    writer.join()
    assert found == ("changed", 0, 0)


@pytest.mark.parametrize(("processes", "machine", "bound", "expected"), [
    (1, 64, 64, 8), (1, 2, 2, 2), (8, 32, 32, 4), (8, 4, 4, 1), (8, 64, 5, 5), (2, 16, 16, 8),
])  # fmt: skip
def test_processes_of_a_machine_share_its_processors(
    monkeypatch: pytest.MonkeyPatch, processes: int, machine: int, bound: int, expected: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(bound)))
    if processes > 1:
        size = str(processes)
        launcher = {"RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "a", "MASTER_PORT": "1"}
        for name, value in launcher.items():
            monkeypatch.setenv(name, value)
    assert reader.default_threads() == expected


def test_truncated_shards_and_nan_in_shards_are_refused(data: Path, tmp_path: Path, either_reader: str) -> None:
    store = tmp_path / "store"
    pack(data, store, dtype="fp32")
    dataset = open_split(store, "train", VOCABULARY)
    path = store / "train-00000.safetensors"
    # The same size as noted, so that the reader itself meets the end of the file.
    table = np.array([[0, path.stat().st_size - 20, 12, 0]])
    assert dataset.source._reader.gather(table, np.empty(12, dtype=np.float32)) == ("short read", 0, 20)
    assert str(dataset.source._error("short read", 6, 12, 20)) == (
        f"{path}: row 6 (image 6): truncated: expected 48 bytes, found 20"
    )
    with path.open("rb+") as file:
        file.seek(-4, os.SEEK_END)
        file.write(np.array([np.nan], dtype=np.float32).tobytes())
    with pytest.raises(ValueError, match=r"row 6 \(image 6\) holds values that are not finite$"):
        open_split(store, "train", VOCABULARY).image_batch([0, 6])


def test_buffers_are_reused() -> None:
    """All buffers are allocated with the first batches. Memory is constant afterwards, also with reading ahead."""
    pool = BufferPool()
    places = [pool.take(10).data_ptr() for _ in range(12)]
    assert len(set(places)) == 4
    assert places == 3 * places[:4]
    held = [pool.take(10) for _ in range(3)]
    assert {pool.take(10).data_ptr() for _ in range(5)} | {one.data_ptr() for one in held} == set(places)
    larger = pool.take(20)
    assert larger.data_ptr() not in places
    del held, larger
    assert len({pool.take(10).data_ptr() for _ in range(12)}) == 4


def test_a_buffer_that_is_not_contiguous_is_refused(data: Path, tmp_path: Path) -> None:
    pack(data, tmp_path / "store", dtype="fp32")
    native = open_split(tmp_path / "store", "train", VOCABULARY).source._reader._reader
    header = (tmp_path / "store" / "train-00000.safetensors").stat().st_size - 7 * 3 * 4 * 4
    table = np.array([[0, header, 12, 0]])
    numbers = np.load(data / "train_ims.npy")[0].reshape(-1)
    for buffer in (np.zeros(24, np.float32)[::2], np.zeros((4, 3), np.float32).T, np.zeros(12, np.float32)[::-1]):
        with pytest.raises(ValueError, match=r"^buffer: expected contiguous memory$"):
            native.gather(table, buffer, "fp32", 2)
        assert not buffer.any()
    for buffer in (np.zeros((3, 4), np.float32), np.zeros((3, 1, 4), np.float32), np.zeros(12, np.float32)):
        assert native.gather(table, buffer, "fp32", 2) == ("", -1, 0)
        np.testing.assert_array_equal(buffer.reshape(-1), numbers)


def test_a_kept_batch_is_not_overwritten(data: Path, tmp_path: Path) -> None:
    pack(data, tmp_path / "store", dtype="fp32")
    dataset = open_split(tmp_path / "store", "train", VOCABULARY)
    stored = torch.from_numpy(np.load(data / "train_ims.npy"))
    kept = [dataset.image_batch([image]) for image in range(7)]
    views = [dataset.image_batch([image])[0, 1] for image in range(7)]
    for image in range(7):
        assert torch.equal(kept[image][0], stored[image])
        assert torch.equal(views[image], stored[image, 1])
    place = dataset.image_batch([0]).data_ptr()
    assert dataset.image_batch([1]).data_ptr() == place, "memory without references is reused"


def test_folders_that_cannot_be_packed_are_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    for arguments, message in (
        (["--data", tmp_path / "none", "--out", store], f"{tmp_path / 'none'}: no such data directory"),
        (["--data", data, "--out", data], f"out: expected another folder than that of the data, got {data}"),
        (["--data", data, "--out", data / "vocab.json"], "expected a folder for the store, found a file"),
    ):
        assert message in error(capsys, "data", "pack", *arguments)[1]
    large = features_of(7)
    large[2, 1, 0] = 70000
    np.save(data / "train_ims.npy", large)
    with pytest.raises(ValueError, match=r"train_ims\.npy: row 2 holds values beyond the range of fp16$"):
        pack(data, store, dtype="fp16")
    large[3, 0, 0] = np.inf
    np.save(data / "train_ims.npy", large)
    with pytest.raises(ValueError, match=r"train_ims\.npy: row 3 holds values that are not finite in float32$"):
        pack(data, tmp_path / "other", dtype="fp32")


def test_the_number_of_shards_is_limited(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = store_format.ShardRecord("validation-65535.safetensors", 10**6, 10**8, 10**12, "a" * 64)
    one = json.dumps({"splits": [{"shards": [attrs.asdict(shard)]}]}, indent=1)
    two = json.dumps({"splits": [{"shards": [attrs.asdict(shard)] * 2}]}, indent=1)
    room = store_format._MAX_MANIFEST_BYTES
    assert 0.8 * room < (len(two) - len(one)) * store_format.MOST_SHARDS < 0.95 * room
    assert room == pack_notes._MAX_NOTES_BYTES
    images = sum(open_split(data, name, VOCABULARY).n_images for name in available_splits(data))
    monkeypatch.setattr(store_format, "MOST_SHARDS", images - 1)
    message = (
        f"shard_bytes: {images} shards of 1 bytes are more than the {images - 1} that a store lists; expected larger "
        "shards, or a store for each part of the data"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pack(data, tmp_path / "store", shard_bytes=1)
    assert not (tmp_path / "store").exists()
    monkeypatch.setattr(store_format, "MOST_SHARDS", images)
    manifest = pack(data, tmp_path / "store", shard_bytes=1)
    assert sum(len(split.shards) for split in manifest.splits) == images


def test_bad_manifests_are_refused(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    pack(data, store)
    content = json.loads((store / "store.json").read_text())
    for changed in (
        [], {**content, "dtype": "int8"}, {**content, "splits": None}, {**content, "vocabulary": 3},
        {**content, "splits": [{**content["splits"][0], "index": "../x"}]},
        {**content, "splits": [{**content["splits"][0], "index": ".."}]},
        {**content, "splits": [{**content["splits"][0], "images": 10**12}]},
        {**content, "splits": [{**content["splits"][0], "width": 0}]},
        {**content, "splits": [content["splits"][0], content["splits"][0]]},
    ):  # fmt: skip
        (store / "store.json").write_text(json.dumps(changed))
        with pytest.raises(
            ValueError, match=rf"^{re.escape(str(store / 'store.json'))}: .*manifest of a feature store"
        ):
            open_split(store, "train", VOCABULARY)
    (store / "store.json").write_text(json.dumps({**content, "format_version": 2}))
    with pytest.raises(ValueError, match="format_version 2 is newer than 1"):
        open_split(store, "train", VOCABULARY)
    (store / "store.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"no split 'test' \(splits in this feature store: dev, train\)"):
        open_split(store, "test", VOCABULARY)
    message = f"{store}: is a feature store, expected a data folder; itm_fast.data.open_split opens either"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PrecomputedDataset(store, "train", VOCABULARY)
