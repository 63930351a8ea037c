"""Measure the store of ADDR's discriminators: bytes, and processor time of a batch and of a save.

Inside: `STORES`, `measure`, `run`, `markdown`.

python -m benchmarks.discriminators --json benchmarks/results/discriminators.json   # about a minute, 3 GB of disk
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.units import commit_of
from itm_fast.benchmarking.run import FORMAT_VERSION
from itm_fast.benchmarking.table import table
from itm_fast.files.environment import environment
from itm_fast.ops.library import build_info
from itm_fast.training.addr.discriminators import Discriminators

__all__ = ["STORES", "markdown", "measure", "run"]

# Name to precision, and whether the rows are mapped from files.
STORES: Mapping[str, tuple[str, bool]] = {
    "float32": ("float32", False),
    "float32, on disk": ("float32", True),
    "low precision": ("low", False),
}
# What the paper states for COCO, in MB.
PUBLISHED = 1800


def measure(images: int, width: int, batch: int, steps: int, precision: str, folder: str | None) -> dict[str, float]:
    """Return bytes of a store, median seconds for a batch of distinct images, and seconds of a save.

    Times are processor time, so that other work on the machine counts little. All rows were in a batch before, because
    the first access includes the time to allocate their memory.
    """
    store = Discriminators(images, width, precision=precision, folder=folder)
    random = torch.Generator().manual_seed(0)
    for first in torch.arange(images).split(4096):
        rows = store.gather(first)
        store.update(rows, torch.ones_like(rows.weights), torch.ones_like(rows.biases), 1e-3)
    gathers, updates = [], []
    for _ in range(steps):
        chosen = torch.randperm(images, generator=random)[:batch]
        gradients = torch.randn(batch, width, generator=random), torch.randn(batch, generator=random)
        start = time.process_time()
        rows = store.gather(chosen)
        middle = time.process_time()
        store.update(rows, *gradients, 1e-3)
        gathers.append(middle - start)
        updates.append(time.process_time() - middle)
    with tempfile.TemporaryDirectory(dir=folder) as target:
        path = Path(target) / "rows.safetensors"
        start = time.process_time()
        store.save(path, "none")
        saved = time.process_time() - start
    return {
        "bytes": store.nbytes,
        "gather_s": statistics.median(gathers),
        "update_s": statistics.median(updates),
        "save_s": saved,
    }


def run(
    images: int,
    width: int,
    batch: int,
    steps: int,
    folder: str | None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure all stores on one thread; return the content of the JSON file."""
    torch.set_num_threads(1)
    before, rows = os.getloadavg()[0], {}
    with tempfile.TemporaryDirectory(dir=folder) as own:
        for name, (precision, mapped) in STORES.items():
            progress(name)
            rows[name] = measure(images, width, batch, steps, precision, own if mapped else None)
    where = {**environment(1, build_info()), "load": [before, os.getloadavg()[0]]}
    sizes = {"images": images, "width": width, "batch": batch, "steps": steps}
    return {"format_version": FORMAT_VERSION, "environment": where, "sizes": sizes, "rows": rows}


def markdown(results: Mapping[str, Any]) -> str:
    """Render the table and the machine."""
    sizes, where = results["sizes"], results["environment"]
    lines = [
        [
            f"store of {sizes['images']:,} images at a width of {sizes['width']}",
            "MB", "gather a batch, ms", "update it, ms", "save, s",
        ]
    ]  # fmt: skip
    for name, row in results["rows"].items():
        times = [f"{1e3 * row['gather_s']:.2f}", f"{1e3 * row['update_s']:.2f}", f"{row['save_s']:.1f}"]
        lines.append([name, f"{row['bytes'] / 1e6:.0f}", *times])
    before, after = where["load"]
    return (
        f"{table(lines)}\n\nBatches of {sizes['batch']} distinct images; medians of {sizes['steps']} batches after "
        f"every row was in one, in processor time on one thread; the machine's load was {before:.1f} at the start and "
        f"{after:.1f} at the end. {where['processor']}, {where['date'][:10]}, commit "
        f"{commit_of(where)}. The paper states "
        f"{PUBLISHED / 1000:.1f} GB for COCO.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the store of ADDR's discriminators.")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--images", type=int, default=113_287, help="training images (default: COCO's 113,287)")
    parser.add_argument("--width", type=int, default=1024, help="width of the fragments (default 1024)")
    parser.add_argument("--batch", type=int, default=128, help="distinct images per batch (default 128)")
    parser.add_argument("--steps", type=int, default=200, help="measured batches (default 200)")
    parser.add_argument("--folder", help="folder for the files (default: the system's temporary folder)")
    options = parser.parse_args()
    results = run(options.images, options.width, options.batch, options.steps, options.folder)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
