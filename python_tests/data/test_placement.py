"""Placement of training features, and batches of captions with similar lengths."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from itm_fast.data import EpochSampler, PrecomputedDataset, open_split, pack, placement
from itm_fast.data.features import ArrayFeatures, ResidentFeatures
from itm_fast.data.host_memory import host_memory
from itm_fast.data.placement import place
from itm_fast.distributed import Launch, World
from python_tests.data.test_store import assert_same_batches, write_data
from python_tests.helpers.commands import error
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.precomputed import VOCABULARY
from python_tests.helpers.runs import config, make_trainer, run, same, weights
from python_tests.helpers.worlds import run_jobs

GIB = 2**30


@pytest.mark.parametrize("asked", ["host", "device"])
@pytest.mark.parametrize("ragged", [False, True])
def test_features_in_memory_give_the_same_batches(tmp_path: Path, asked: str, ragged: bool) -> None:
    data = write_data(tmp_path / "data")
    if ragged:
        (data / "train_regions.txt").write_text("3\n1\n2\n3\n3\n1\n2\n")
    pack(data, tmp_path / "store", dtype="fp32", shard_bytes=100)
    on_disk = PrecomputedDataset(data, "train", VOCABULARY)
    indices = np.random.default_rng(0).permutation(35)
    for path in (data, tmp_path / "store"):
        dataset = open_split(path, "train", VOCABULARY)
        dataset.source, choice = place(dataset.source, asked, torch.device("cpu"))
        assert choice.where == asked
        assert isinstance(dataset.source, ResidentFeatures)
        expected, found = on_disk.batch(indices).features, dataset.batch(indices).features
        if ragged:
            assert torch.equal(found.offsets, expected.offsets)
            assert torch.equal(found.values, expected.values)
        else:
            assert_same_batches(on_disk, dataset, torch.float32)


def test_images_are_copied_one_by_one_from_the_host_to_a_gpu() -> None:
    """Check the copies with the CPU as their target."""
    values = torch.arange(24.0).view(12, 2).to(torch.bfloat16)
    images = np.array([2, 0, 2])
    for counts in (None, np.array([2, 1, 3, 6])):
        shape = (4, 3 if counts is None else 6, 2)
        sources = [ResidentFeatures(values, shape, counts, torch.device("cpu"), by_image=one) for one in (True, False)]
        copied, selected = (source.gather(images) for source in sources)
        if counts is None:
            expected = values.float().view(4, 3, 2)[images]
            assert torch.equal(copied, expected)
            assert torch.equal(selected, expected)
        else:
            expected = values.float()[[3, 4, 5, 0, 1, 3, 4, 5]]
            for found in (copied, selected):
                assert found.lengths.tolist() == [3, 2, 3]
                assert torch.equal(found.values, expected)
        for source in sources:
            none = source.gather(images[:0])
            assert (none.shape if counts is None else none.values.shape) == ((0, 3, 2) if counts is None else (0, 2))


@pytest.mark.parametrize("counts", [None, np.full(50, 3)])
def test_all_images_of_a_batch_are_copied_in_one_call(counts: np.ndarray | None) -> None:
    """A call per image would take the Python lock from the training step each time."""

    class Calls(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(self, function, _types, args=(), kwargs=None):
            self.names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    values = torch.arange(300.0).view(150, 2)
    source = ResidentFeatures(values, (50, 3, 2), counts, torch.device("cpu"), by_image=True)
    found = []
    for n in (1, 40):
        with Calls() as calls:
            source.gather(np.arange(n))
        found.append(calls.names)
    assert found[0] == found[1]
    assert found[0].count("_foreach_copy_") == 1


@pytest.mark.parametrize(
    ("asked", "device", "free", "expected"),
    [
        ("auto", "cuda", {"cuda": (138, 140), "cpu": (100, 128)},
         ("device", "16.00 GiB of features, 103.00 GiB to spare in the memory of the device")),
        ("auto", "cuda", {"cuda": (22, 23), "cpu": (100, 128)},
         ("device", "16.00 GiB of features, 16.25 GiB to spare in the memory of the device")),
        ("auto", "cuda", {"cuda": (15, 16), "cpu": (100, 128)},
         ("host", "16.00 GiB of features, 68.00 GiB to spare in the memory of the host")),
        ("auto", "cuda", {"cuda": (15, 16), "cpu": (12, 32)},
         ("disk", "16.00 GiB of features, 11.00 GiB to spare in the memory of the device; "
                  "16.00 GiB of features, 4.00 GiB to spare in the memory of the host")),
        ("auto", "cuda", {"cuda": (15, 16)},
         ("disk", "16.00 GiB of features, 11.00 GiB to spare in the memory of the device; "
                  "16.00 GiB of features, the free memory of the host (cpu) is unknown")),
        ("auto", "mps", {"cpu": (100, 128)},
         ("disk", "16.00 GiB of features, the free memory of the device (mps) is unknown")),
        ("auto", "cpu", {}, ("disk", "16.00 GiB, which the system caches; training runs on the CPU")),
        ("disk", "cuda", {}, ("disk", "as asked for")),
        ("host", "cpu", {"cpu": (25, 32)},
         ("host", "16.00 GiB of features, 17.00 GiB to spare in the memory of the host")),
    ],
)  # fmt: skip
def test_the_choice_and_its_reason(
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    device: str,
    free: dict[str, tuple[int, int]],
    expected: tuple[str, str],
) -> None:
    known = {name: (GIB * size[0], GIB * size[1]) for name, size in free.items()}
    monkeypatch.setattr(placement, "_memory", lambda where: known.get(where.type))
    choice = placement._choice(16 * GIB, asked, torch.device(device), {}, World())
    assert (choice.where, choice.reason) == expected


def test_processes_of_a_machine_share_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has its own device."""
    sizes = {"cuda": (15 * GIB, 16 * GIB), "cpu": (100 * GIB, 128 * GIB)}
    monkeypatch.setattr(placement, "_memory", lambda where: sizes[where.type])

    def chosen(needed: int, processes: int) -> placement.Placement:
        # All processes have the same values, so one is enough.
        world = SimpleNamespace(launch=Launch(local_size=processes), objects=lambda value: [value] * processes)
        return placement._choice(needed, "auto", torch.device("cuda"), {}, world)

    found = [chosen(16 * GIB, processes) for processes in (4, 5)]
    assert [choice.where for choice in found] == ["host", "disk"]
    assert found[0].reason == "16.00 GiB of features, 17.00 GiB to spare in the memory of the host"
    small = chosen(10 * GIB, 8)
    assert (small.where, small.reason) == (
        "device", "10.00 GiB of features, 11.00 GiB to spare in the memory of the device",
    )  # fmt: skip
    # Without GPUs the device is the machine itself.
    for processes, places in ((1, True), (4, False)):
        world = SimpleNamespace(launch=Launch(local_size=processes), objects=lambda value: [value])
        if places:
            assert placement._choice(40 * GIB, "device", torch.device("cpu"), {}, world).where == "device"
        else:
            with pytest.raises(ValueError, match=r"^features: they do not fit into the memory of the device"):
                placement._choice(40 * GIB, "device", torch.device("cpu"), {}, world)


@pytest.mark.thorough
def test_all_processes_choose_the_same_place(tmp_path: Path) -> None:
    """Two processes need 20 of 60 GiB each. A process that checks after the other has allocated would find only 40."""
    names = ("room", "less for one", "not locked by one", "refused by one")
    cases = [
        {"size": 2, "function": "python_tests.data.placing:place_late", "value": {"out": str(tmp_path), "case": name}}
        for name in names
    ]
    for outcomes in run_jobs(cases):
        assert outcomes == [(0, "", "")] * 2, "\n".join(error for _, _, error in outcomes)
    found = {name: [(tmp_path / f"{name}{rank}").read_text() for rank in range(2)] for name in names}
    host = "20.00 GiB of features, 30.00 GiB to spare in the memory of the host"
    assert found == {
        "room": [f"host ({host})"] * 2,
        "less for one": ["disk (20.00 GiB of features, 10.00 GiB to spare in the memory of the host)"] * 2,
        "not locked by one": [f"disk ({host}, but it could not be page-locked (CUDA error 2))"] * 2,
        "refused by one": ["train_ims.npy: row 7 holds values that are not finite in float32"] * 2,
    }


def test_placing_in_unknown_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placement._memory(torch.device("mps")) is None
    monkeypatch.setattr(placement, "host_memory", lambda: None)
    for asked, name in (("device", "device (mps)"), ("host", "host (cpu)")):
        message = f"features: the free memory of the {name} is unknown; expected auto or disk"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            placement._choice(1, asked, torch.device("mps"), {}, World())


class Runtime:
    """Replace CUDA's page locking: record the locked memory, and return `status` from locking."""

    def __init__(self, status: int) -> None:
        self.status, self.locked = status, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:  # noqa: N802
        if self.status == 0:
            self.locked[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.locked[address]


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, status: int) -> tuple[Runtime, list[object]]:
    """Simulate a GPU that reports free memory but fails to allocate, and a host with the result `status` of locking.

    Returns:
        The record of locked memory, and the devices on which kernels were started.
    """
    runtime, kernels = Runtime(status), []

    def refuse(*_sizes: int, **_options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16 GiB")

    def report(_size: int, device: torch.device) -> torch.Tensor:
        kernels.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(placement, "_memory", lambda _where: (100 * GIB, 128 * GIB))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(torch, "zeros", report)
    return runtime, kernels


def test_auto_tries_the_next_place_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ArrayFeatures(np.arange(24, dtype=np.float32).reshape(4, 3, 2), "features")
    _, kernels = on_a_gpu(monkeypatch, status=2)
    device = torch.device("cuda")
    found, choice = place(source, "auto", device)
    assert found is source
    what = "0.00 GiB of features, 68.00 GiB to spare in the memory of the"
    on_device = f"{what} device, but it is out of memory"
    on_host = f"{what} host, but it could not be page-locked (CUDA error 2)"
    assert (choice.where, choice.reason) == ("disk", f"{on_device}; {on_host}")
    assert kernels == [device], "the error that CUDA keeps is taken from it"
    for asked, reason in (("device", on_device), ("host", on_host)):
        message = f"features: they cannot be placed: {reason}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            place(source, asked, device)


def test_memory_is_unlocked_when_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    runtime, kernels = on_a_gpu(monkeypatch, status=0)
    features, choice = place(ArrayFeatures(values, "features"), "auto", torch.device("cuda"))
    assert choice.where == "host"
    assert runtime.locked == {features.values.data_ptr(): 96}
    rows = features.stored(1, 3)
    assert torch.equal(rows, torch.from_numpy(values[1:3]).view(6, 2))
    del features
    assert len(runtime.locked) == 1, "rows are left"
    del rows
    assert (runtime.locked, kernels) == ({}, [])


def written(root: Path, **contents: object) -> None:
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def test_container_memory_is_the_limit_of_the_control_group(tmp_path: Path) -> None:
    assert host_memory(tmp_path) is None
    written(tmp_path, **{"proc/meminfo": "MemTotal: 4000 kB\nMemFree: 1 kB\nMemAvailable:    3000 kB"})
    assert host_memory(tmp_path) == (3000 * 1024, 4000 * 1024)
    new, old = "sys/fs/cgroup", "sys/fs/cgroup/memory"
    # Version 2: the group above has a limit, the own one none; 300,000 of what is taken are cached files.
    written(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/above/own",
            f"{new}/above/memory.max": 2_000_000,
            f"{new}/above/memory.current": 1_500_000,
            f"{new}/above/memory.stat": "anon 1200000\ninactive_file 300000",
            f"{new}/above/own/memory.max": "max",
            f"{new}/above/own/memory.current": 5,
            f"{new}/above/own/memory.stat": "inactive_file 0",
        },
    )
    assert host_memory(tmp_path) == (800_000, 2_000_000)
    # Version 1, seen from within a container: the path is one of the host, the limit lies at the top.
    written(
        tmp_path,
        **{
            "proc/self/cgroup": "4:cpu,memory:/docker/12ab\n0::/",
            f"{old}/memory.limit_in_bytes": 700_000,
            f"{old}/memory.usage_in_bytes": 650_000,
            f"{old}/memory.stat": "total_inactive_file 50000",
        },
    )
    assert host_memory(tmp_path) == (100_000, 700_000)


def test_features_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_concepts(tmp_path / "data")
    monkeypatch.setattr(placement, "_memory", lambda _where: (1000, 2000))
    expected = "features: they do not fit into the memory of the host: 0.00 GiB of features, 0.00 GiB to spare in the "
    status, message = error(capsys, "train", "--data", data, "--out", tmp_path / "run", "--features", "host")
    assert (status, message) == (1, f"{expected}memory of the host")
    assert not (tmp_path / "run").exists()


def test_training_does_not_depend_on_the_placement(tmp_path: Path) -> None:
    data = write_concepts(tmp_path / "data")
    pack(data, tmp_path / "store", dtype="bf16")
    for where in ("disk", "host", "device"):
        run(config(tmp_path / "store", tmp_path / where, features=where, region_augmentation=0.2))
        assert same(weights(tmp_path / where), weights(tmp_path / "disk"))


@given(
    n=st.integers(1, 90), size=st.integers(1, 9), window=st.integers(1, 5), seed=st.integers(0, 3), drop=st.booleans()
)
def test_bucketed_batches_contain_every_item_once(n: int, size: int, window: int, seed: int, drop: bool) -> None:
    lengths = np.random.default_rng(seed).integers(5, 25, n)
    options = {"lengths": lengths, "bucket_batches": window, "drop_last": drop, "seed": seed}
    batches = [batch.tolist() for batch in EpochSampler(n, size, **options)]
    plain = [batch.tolist() for batch in EpochSampler(n, size, seed=seed, drop_last=drop)]
    assert [len(batch) for batch in batches] == [len(batch) for batch in plain]
    assert sorted(itertools.chain(*batches)) == sorted(itertools.chain(*plain))
    if window == 1:
        assert sorted(map(sorted, batches)) == sorted(map(sorted, plain))
    for start in range(len(batches) + 1):
        assert [batch.tolist() for batch in EpochSampler(n, size, start_batch=start, **options)] == batches[start:]


def test_bucketed_batches_are_random_and_have_less_padding() -> None:
    lengths = np.clip(np.rint(6 + np.random.default_rng(0).gamma(5, 1, 4000)), 6, 22)

    def share_of_padding(batches: list[np.ndarray]) -> float:
        slots = sum(len(batch) * lengths[batch].max() for batch in batches)
        return 1 - lengths.sum() / slots

    plain = list(EpochSampler(4000, 40, seed=1))
    bucketed = [
        list(EpochSampler(4000, 40, seed=1, epoch=epoch, lengths=lengths, bucket_batches=25)) for epoch in (0, 1)
    ]
    assert share_of_padding(plain) > 0.3
    assert share_of_padding(bucketed[0]) < 0.05
    # Neither short captions come first, nor the same ones together in each epoch.
    means = np.array([lengths[batch].mean() for batch in bucketed[0]])
    assert abs(np.corrcoef(np.arange(100), means)[0, 1]) < 0.4
    together = [{frozenset(pair) for batch in epoch for pair in itertools.pairwise(batch)} for epoch in bucketed]
    assert len(together[0] & together[1]) < 0.01 * len(together[0])


def test_a_bucketed_run_resumes_at_its_position(tmp_path: Path) -> None:
    data = write_concepts(tmp_path / "data")
    (data / "train_caps.txt").write_text(
        "".join(
            f"{line.strip()} {'ball ' * (number % 5)}\n" for number, line in enumerate((data / "train_caps.txt").open())
        )
    )
    trainer = make_trainer(config(data, tmp_path / "x", bucket_batches=3))
    first = next(trainer._batches(0))
    assert int(first.lengths.max()) - int(first.lengths.min()) <= 2
    assert torch.equal(
        next(trainer._batches(2)).caption_index, list(itertools.islice(trainer._batches(0), 3))[2].caption_index
    )
    run(config(data, tmp_path / "whole", bucket_batches=3))
    run(config(data, tmp_path / "parts", bucket_batches=3, epochs=1))
    run(config(data, tmp_path / "parts", bucket_batches=3), resume=True)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    with pytest.raises(ValueError, match="holds a run with bucket_batches = 3, not 0"):
        run(config(data, tmp_path / "parts"), resume=True)
