"""Measures the store of ADDR's discriminators: bytes, and CPU time of a batch and of a save, and prints the table.

python benchmarks/discriminators.py   # COCO's training images at a width of 1024: about a minute, 3 GB of disk
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from itm_fast.training.discriminators import Discriminators

STORES = (
    ("float32", "float32", False),
    ("float32, on disk", "float32", True),
    ("low precision", "low", False),
)


def measure(images: int, width: int, batch: int, steps: int, precision: str, folder: str | None) -> dict[str, float]:
    """Bytes of a store, the median milliseconds that a batch of distinct images takes, and the seconds of a save.

    Times are those of the processor, so that what else the machine does counts little. All rows have been in a batch
    before: the first time, the system has to give them memory.
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
    milliseconds = {"gather": statistics.median(gathers) * 1e3, "update": statistics.median(updates) * 1e3}
    return {"megabytes": store.nbytes / 1e6, **milliseconds, "save": saved}


def main() -> None:
    parser = argparse.ArgumentParser(description="What the discriminators of ADDR cost beside the model.")
    parser.add_argument("--images", type=int, default=113_287, help="training images (default: COCO's 113,287)")
    parser.add_argument("--width", type=int, default=1024, help="width of the fragments (default 1024)")
    parser.add_argument("--batch", type=int, default=128, help="distinct images of a batch (default 128)")
    parser.add_argument("--steps", type=int, default=200, help="measured batches (default 200)")
    parser.add_argument("--folder", help="where the files lie (default: the system's folder for temporary files)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.images:,} images, width {options.width}, batches of {options.batch}, one thread\n")
    print("| store | MB | gather a batch, ms | update it, ms | save, s |")
    print("| --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, precision, mapped in STORES:
            where = folder if mapped else None
            found = measure(options.images, options.width, options.batch, options.steps, precision, where)
            times = f"{found['gather']:.2f} | {found['update']:.2f} | {found['save']:.1f}"
            print(f"| {name} | {found['megabytes']:.0f} | {times} |")


if __name__ == "__main__":
    main()
