"""Measure reading batches of features: the native reader compared with a memory-mapped gather.

Inside: `run`, `markdown`.

python -m benchmarks.reader --json benchmarks/results/reader.json   # some minutes, 1 GB of disk
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from itm_fast.data import BatchLoader, CaptionDataset, layout, load_vocabulary, open_split, pack
from itm_fast.data.reader import default_threads
from itm_fast.data.synthetic import write_synthetic
from itm_fast.files.environment import environment
from itm_fast.ops.library import build_info

__all__ = ["FORMAT_VERSION", "markdown", "run"]

FORMAT_VERSION = 2
_BATCH = 128

# The compared ways, with their labels in the table.
LABELS = {
    "numpy": "memory-mapped NumPy gather, `DataLoader` of 2 workers",
    "folder": "`BatchLoader` of 2 workers on the folder, values checked",
    "fp32": "store, fp32, values checked",
    "bf16": "store, bf16, values checked, float32 out",
}


class _Gather(Dataset[torch.Tensor]):
    """Read rows of a memory map by a list of indices, the plain way."""

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


def each_once(images: int, seed: int) -> list[np.ndarray]:
    """Return batches of all images in a random order; the last one may be smaller."""
    return np.split(np.random.default_rng(seed).permutation(images), range(_BATCH, images, _BATCH))


class _Images(CaptionDataset):
    """A split whose items are images, so that all ways read the same rows."""

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
    """Return rows per second from the `warm`th batch on, when worker processes have started and their queues are full.

    Also return rows per second of processor time over the whole pass, including worker processes.
    """
    before = _processor_seconds()
    batches = way()
    rows = sum(len(next(batches)) for _ in range(warm))
    start = time.perf_counter()
    timed = sum(len(batch) for batch in batches)
    seconds = time.perf_counter() - start
    # Worker processes count once they have ended, which needs the end of their iterator.
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
    """Return the share of a file's pages in the system's cache, from mincore."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        mapped = np.memmap(file, dtype=np.uint8, mode="r", shape=(size,))
        pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        arguments = (ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data))
        if ctypes.CDLL(None).mincore(*arguments):
            raise OSError(f"{path}: the system does not report which pages are cached")
        return float(np.mean(pages & 1))


def _direct_rate(paths: list[Path], block: int, offsets: list[tuple[int, int]], threads: int) -> float | None:
    """Return bytes per second of reads that bypass the cache (O_DIRECT), `threads` at a time; None if refused."""
    try:
        handles = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
    except OSError:
        return None

    def read(places: list[tuple[int, int]]) -> int:
        with mmap.mmap(-1, block) as buffer:
            return sum(os.preadv(handles[file], [buffer], offset) for file, offset in places)

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(read, [offsets[first::threads] for first in range(threads)]))
    seconds = time.perf_counter() - start
    for handle in handles:
        os.close(handle)
    return done / seconds


def _cold(name: str, files: list[Path], way: _Way, images: int, row_bytes: int) -> dict[str, Any]:
    """Read all images once with a cold cache, and measure the disk's rates without the cache."""
    _drop_from_cache(files)
    share = statistics.fmean(_cached_share(path) for path in files)
    start = time.perf_counter()
    rows = sum(len(batch) for batch in way())
    seconds = time.perf_counter() - start
    if rows != images:
        raise ValueError(f"{name}: expected each of {images} images once, got {rows} rows")
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
        "images": rows,
        "rows_per_second": rows / seconds,
        "bytes_per_second": rows * row_bytes / seconds,
        "disk_threads": default_threads(),
        "disk_random_bytes_per_second": _direct_rate(files, block, places, default_threads()),
        "disk_sequential_bytes_per_second": _direct_rate(files[:1], 2**22, in_turn, 1),
    }


def run(folder: Path, *, scale: float, batches: int, rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Write synthetic data and stores under `folder`, measure, and return the content of the JSON file."""
    load_before = os.getloadavg()[0]
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
                raise ValueError(f"{name}: numbers differ from those of the file")
    warm: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for name, way in ways.items():
            warm[name].append(_rate(way))
    row_bytes = 4 * int(shape[1]) * int(shape[2])
    cold, once = [], _ways(data, stores, each_once(int(shape[0]), 2))
    # Only stores: pages of a mapped file cannot be dropped from the cache.
    for name, path in stores.items():
        progress(f"cold, {name}")
        files = sorted(path.glob("train-0*.safetensors"))
        cold.append(_cold(name, files, once[name], int(shape[0]), row_bytes // (2 if name == "bf16" else 1)))
    return {
        "format_version": FORMAT_VERSION,
        "environment": environment(torch.get_num_threads(), build_info()),
        "images": int(shape[0]),
        "row_bytes": row_bytes,
        "batch": _BATCH,
        "batches": batches,
        "warm_rows_per_second": {name: [wall for wall, _ in rates] for name, rates in warm.items()},
        "warm_rows_per_processor_second": {name: [own for _, own in rates] for name, rates in warm.items()},
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "cold": cold,
    }


def markdown(results: Mapping[str, Any]) -> str:
    """Render the measurements of reading for the page."""
    where, row_bytes = results["environment"], results["row_bytes"]
    base = results["warm_rows_per_second"]["numpy"]
    lines = [
        f"Measured on {where['date'][:10]} with `{where['command']}` on {where['processor']}, {where['cores']} cores, "
        f"torch {where['torch']}: batches of {results['batch']} random images of {row_bytes / 1024:,.0f} KB (float32) "
        f"out of {results['images']:,}, all in the system's cache. Medians of {len(base)} interleaved rounds, smallest "
        "and largest in brackets; ratios are medians over the rounds. Load of the machine: "
        f"{results['load_before']:.1f} before, {results['load_after']:.1f} after. Processor time includes worker "
        "processes, too.",
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
    first = results["cold"][0]
    lines += [
        "",
        f"Cold: files were dropped from the system's cache by `posix_fadvise` ({share:.0%} of their pages were left); "
        f"{first['images']:,} images, each read once in random order. The disk's own rate is that of reads past the "
        f"cache (`O_DIRECT`): random images {first['disk_threads']} at a time, like the reader's threads, and in order "
        "one at a time. A virtual machine cannot drop the cache of its host.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure reading batches of features.")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: the temporary folder)")
    parser.add_argument("--scale", type=float, default=0.01, help="share of COCO's images (default 0.01: 0.4 GB)")
    parser.add_argument("--batches", type=int, default=24, help="batches per pass (default 24)")
    parser.add_argument("--rounds", type=int, default=15, help="passes of each kind (default 15)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = run(
            Path(folder),
            scale=options.scale,
            batches=options.batches,
            rounds=options.rounds,
            progress=lambda what: print(what, file=sys.stderr, flush=True),
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
