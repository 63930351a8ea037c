"""What reading batches of features costs: the native reader beside a memory-mapped gather, and buckets of captions.

Inside: `run`, `markdown`, `buckets_markdown`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from itm_fast import models
from itm_fast.benchmarking.run import environment
from itm_fast.data import BatchLoader, CaptionDataset, EpochSampler, layout, load_vocabulary, open_split, pack
from itm_fast.data.synthetic import write_synthetic
from itm_fast.ops.library import build_info

__all__ = ["FORMAT_VERSION", "buckets_markdown", "markdown", "run"]

FORMAT_VERSION = 1
_BATCH = 128
_BUCKETS = (0, 10, 50)
_ENCODER_BATCHES, _ENCODER_ROUNDS = 4, 3

# What is compared, as the table has it.
LABELS = {
    "numpy": "memory-mapped NumPy gather, `DataLoader` of 2 workers",
    "folder": "`BatchLoader` of 2 workers on the folder, values checked",
    "fp32": "store, fp32, values checked",
    "bf16": "store, bf16, values checked, float32 out",
}


class _Gather(Dataset[torch.Tensor]):
    """The plain way: rows of a memory map, by a list of indices."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.array: np.ndarray | None = None

    def __getitem__(self, indices: np.ndarray) -> torch.Tensor:
        if self.array is None:
            self.array = np.load(self.path, mmap_mode="r")
        return torch.from_numpy(self.array[indices])


def _batches(images: int, n: int, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, images, _BATCH) for _ in range(n)]


class _Images(CaptionDataset):
    """A split whose items are images, so that each way is asked for the same rows."""

    def __init__(self, inner: CaptionDataset) -> None:
        self.inner, self.source = inner, inner.source

    def batch(self, indices: Any) -> Any:
        return self.inner.image_batch(indices)


_Way = Callable[[], Iterator[Any]]


def _ways(
    folder: Path, stores: Mapping[str, Path], indices: list[np.ndarray]
) -> dict[str, Callable[[], Iterator[Any]]]:
    vocabulary = load_vocabulary(folder)
    gather = _Gather(layout.split_path(folder, "train", "ims.npy"))
    published = _Images(open_split(folder, "train", vocabulary))
    packed = {name: _Images(open_split(path, "train", vocabulary)) for name, path in stores.items()}
    ways: dict[str, _Way] = {
        "numpy": lambda: iter(DataLoader(gather, sampler=indices, batch_size=None, num_workers=2)),
        "folder": lambda: iter(BatchLoader(published, indices, workers=2)),
    }
    for name, dataset in packed.items():
        ways[name] = lambda dataset=dataset: iter(BatchLoader(dataset, indices))  # type: ignore[misc]
    return ways


def _rate(way: _Way, warm: int = 8) -> tuple[float, float]:
    """Rows per second from the `warm`th batch on, when worker processes have started and their queues are full.

    Then rows per second of processor time, that of worker processes included, of the whole pass.
    """
    before = _processor_seconds()
    batches = way()
    rows = sum(len(next(batches)) for _ in range(warm))
    start = time.perf_counter()
    timed = sum(len(batch) for batch in batches)
    seconds = time.perf_counter() - start
    # Worker processes have ended, and so count, once their iterator is gone.
    del batches
    return timed / seconds, (rows + timed) / (_processor_seconds() - before)


def _processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _drop_from_cache(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cached_share(path: Path) -> float:
    """The share of a file's pages that lie in the system's cache, by mincore."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        mapped = np.memmap(file, dtype=np.uint8, mode="r", shape=(size,))
        pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        arguments = (ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
        if ctypes.CDLL(None).mincore(*arguments):
            raise OSError(f"{path}: the system does not say what of it is cached")
        return float(np.mean(pages & 1))


def _direct_rate(paths: list[Path], block: int, offsets: list[tuple[int, int]]) -> float | None:
    """Bytes per second of reads past the system's cache (O_DIRECT), one after the other; None where that is refused."""
    buffer = mmap.mmap(-1, block)
    try:
        handles = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
    except OSError:
        return None
    start = time.perf_counter()
    done = sum(os.preadv(handles[file], [buffer], offset) for file, offset in offsets)
    seconds = time.perf_counter() - start
    for handle in handles:
        os.close(handle)
    return done / seconds


def _cold(name: str, files: list[Path], way: _Way, row_bytes: int) -> dict[str, Any]:
    """One pass over rows that the system's cache does not hold, and the same number of bytes past it."""
    _drop_from_cache(files)
    share = statistics.fmean(_cached_share(path) for path in files)
    start = time.perf_counter()
    rows = sum(len(batch) for batch in way())
    seconds = time.perf_counter() - start
    random = np.random.default_rng(1)
    block = -(-row_bytes // 4096) * 4096
    places = []
    for file in random.integers(0, len(files), 256).tolist():
        blocks = (files[file].stat().st_size - block) // 4096
        places.append((file, int(random.integers(0, blocks)) * 4096))
    in_turn = [(0, offset) for offset in range(0, min(files[0].stat().st_size, 2**28) - 2**22, 2**22)]
    return {
        "way": name,
        "cached_share_before": share,
        "rows_per_second": rows / seconds,
        "bytes_per_second": rows * row_bytes / seconds,
        "disk_random_bytes_per_second": _direct_rate(files, block, places),
        "disk_sequential_bytes_per_second": _direct_rate(files[:1], 2**22, in_turn),
    }


def _buckets(folder: Path) -> list[dict[str, Any]]:
    """What padding there is by the size of the window, and processor time of SCAN's text encoder there and back."""
    train = open_split(folder, "train", load_vocabulary(folder))
    lengths = train.caption_lengths.numpy()
    torch.manual_seed(0)
    model = models.create("scan", vocab_size=len(train.vocabulary), feature_dim=8, embed_dim=256)
    rows: list[dict[str, Any]] = []
    for window in _BUCKETS:
        batches = list(EpochSampler(len(train), _BATCH, lengths=lengths, bucket_batches=window))
        slots = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
        shares = {"bucket_batches": window, "padding_share": 1 - int(lengths.sum()) / slots, "encoder_seconds": []}
        # Evenly spread over all lengths: what a step costs on average.
        batches.sort(key=lambda batch: int(lengths[batch].sum()))
        spread = (np.arange(_ENCODER_BATCHES) + 0.5) / _ENCODER_BATCHES * len(batches)
        rows.append({**shares, "chosen": [batches[int(place)] for place in spread]})
    for _ in range(_ENCODER_ROUNDS):
        for row in rows:
            start = time.process_time()
            for batch in row["chosen"]:
                words: Any = model.encode_captions(*train.caption_batch(batch))
                words.values.sum().backward()
            row["encoder_seconds"].append((time.process_time() - start) / _ENCODER_BATCHES)
    return [{name: value for name, value in row.items() if name != "chosen"} for row in rows]


def run(folder: Path, *, scale: float, batches: int, rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Writes synthetic data and stores under `folder`, measures, and returns what the JSON file holds."""
    progress("data")
    data = write_synthetic(folder / "data", scale=scale)
    stores = {dtype: folder / dtype for dtype in ("fp32", "bf16")}
    for dtype, path in stores.items():
        pack(data, path, dtype=dtype, splits=["train"])
    shape = np.load(data / "train_ims.npy", mmap_mode="r").shape
    indices = _batches(int(shape[0]), batches, 0)
    ways = _ways(data, stores, indices)
    progress("equality")
    expected = np.load(data / "train_ims.npy", mmap_mode="r")
    for name in ("numpy", "folder", "fp32"):
        for wanted, found in zip(indices, ways[name](), strict=True):
            if not np.array_equal(expected[wanted], found.numpy()):
                raise ValueError(f"{name}: other numbers than those of the file")
    warm: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for name, way in ways.items():
            warm[name].append(_rate(way))
    row_bytes = 4 * int(shape[1]) * int(shape[2])
    cold = []
    # Stores alone: pages of a file that is mapped cannot be dropped from the cache.
    for name, path in stores.items():
        progress(f"cold, {name}")
        files = sorted(path.glob("train-0*.safetensors"))
        cold.append(_cold(name, files, ways[name], row_bytes // (2 if name == "bf16" else 1)))
    return {
        "format_version": FORMAT_VERSION,
        "environment": environment(torch.get_num_threads(), build_info()),
        "images": int(shape[0]),
        "row_bytes": row_bytes,
        "batch": _BATCH,
        "batches": batches,
        "warm_rows_per_second": {name: [wall for wall, _ in rates] for name, rates in warm.items()},
        "warm_rows_per_processor_second": {name: [own for _, own in rates] for name, rates in warm.items()},
        "load_average": os.getloadavg()[0],
        "cold": cold,
        "buckets": _buckets(data),
    }


def markdown(results: Mapping[str, Any]) -> str:
    """What was measured of reading, as the page has it."""
    where, row_bytes = results["environment"], results["row_bytes"]
    base = results["warm_rows_per_second"]["numpy"]
    lines = [
        f"Measured on {where['date'][:10]} with `{where['command']}` on {where['processor']}, {where['cores']} cores, "
        f"torch {where['torch']}: batches of {results['batch']} random images of {row_bytes / 1024:,.0f} KB (float32) "
        f"out of {results['images']:,}, all in the system's cache. Medians of {len(base)} interleaved rounds, smallest "
        f"and largest in brackets; ratios are medians over the rounds. Other work was on the machine (load "
        f"{results['load_average']:.0f}), so that processor time, of worker processes too, says more than the clock.",
        "",
        "| warm cache | images per second | against NumPy | images per second of processor time | against NumPy |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, label in LABELS.items():
        cells = [label]
        for kind in ("warm_rows_per_second", "warm_rows_per_processor_second"):
            rates, base = results[kind][name], results[kind]["numpy"]
            ratio = statistics.median(rate / other for rate, other in zip(rates, base, strict=True))
            cells += [f"{statistics.median(rates):,.0f} [{min(rates):,.0f}, {max(rates):,.0f}]", f"{ratio:.1f}x"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| cold cache | MB/s | images per second | disk: random images, MB/s | disk: in order, MB/s |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in results["cold"]:
        disk = [row["disk_random_bytes_per_second"], row["disk_sequential_bytes_per_second"]]
        cells = [LABELS[row["way"]], f"{row['bytes_per_second'] / 1e6:,.0f}", f"{row['rows_per_second']:,.0f}"]
        cells += ["refused" if rate is None else f"{rate / 1e6:,.0f}" for rate in disk]
        lines.append(f"| {' | '.join(cells)} |")
    share = max(row["cached_share_before"] for row in results["cold"])
    lines += [
        "",
        f"Cold: files were dropped from the system's cache by `posix_fadvise` ({share:.0%} of their pages were left). "
        "The disk's own rate is that of reads past the cache (`O_DIRECT`), one at a time. What the host of a virtual "
        "machine caches cannot be dropped from within.",
    ]
    return "\n".join(lines) + "\n"


def buckets_markdown(results: Mapping[str, Any]) -> str:
    """What was measured of batches of like length."""
    rows = results["buckets"]
    lines = [
        "| `--bucket-batches` | padding among the token ids | text encoder, forward and backward |",
        "| ---: | ---: | ---: |",
    ]
    for row in rows:
        times = row["encoder_seconds"]
        ratio = statistics.median(plain / own for plain, own in zip(rows[0]["encoder_seconds"], times, strict=True))
        gain = f"{1000 * statistics.median(times):,.0f} ms, {ratio:.2f}x as fast"
        lines.append(f"| {row['bucket_batches']} | {row['padding_share']:.1%} | {gain} |")
    lines += [
        "",
        f"Synthetic captions of COCO's lengths, batches of {results['batch']}, processor time of SCAN's bidirectional "
        "GRU of 256 units a direction. Attention runs on packed words and gains nothing.",
    ]
    return "\n".join(lines) + "\n"
