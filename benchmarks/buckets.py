"""Benchmark length bucketing (batches of captions of similar length): whole training steps, with a GRU and with BERT.

Inside: `run`, `markdown`.

python -m benchmarks.buckets --threads 1 --json benchmarks/results/buckets.json   # a quarter of an hour
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itm_fast import models
from itm_fast.benchmarking.table import table
from itm_fast.data import EpochSampler, load_vocabulary, open_split
from itm_fast.data.synthetic import write_synthetic
from itm_fast.files.environment import environment
from itm_fast.losses import TripletLoss
from itm_fast.ops.library import build_info

__all__ = ["FORMAT_VERSION", "markdown", "run"]

FORMAT_VERSION = 1
WINDOWS = (0, 10, 50)
# SCAN at its published sizes, and VSE-infinity with a BERT that is small enough for a CPU.
MODELS: dict[str, dict[str, Any]] = {
    "SCAN t2i, GRU": {"name": "scan", "direction": "t2i"},
    "VSE-infinity, BERT of 4 layers of 256": {
        "name": "vse_infty", "text_encoder": "bert", "bert_dim": 256, "bert_layers": 4, "bert_heads": 4,
        "bert_hidden_dim": 1024,
    },
}  # fmt: skip


def chosen_batches(lengths: np.ndarray, window: int, batch: int, count: int) -> tuple[list[np.ndarray], float]:
    """Return `count` batches of an epoch, evenly spread over all lengths, and their share of padding token ids."""
    batches = list(EpochSampler(len(lengths), batch, lengths=lengths, bucket_batches=window))
    slots = sum(len(one) * int(lengths[one].max()) for one in batches)
    full = sorted((one for one in batches if len(one) == batch), key=lambda one: int(lengths[one].sum()))
    spread = (np.arange(count) + 0.5) / count * len(full)
    return [full[int(place)] for place in spread], 1 - int(lengths.sum()) / slots


def run(
    folder: Path,
    *,
    scale: float,
    batch: int,
    batches: int,
    rounds: int,
    progress: Callable[[str], None],
    sizes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write synthetic data under `folder` and measure steps: a warm-up round, then interleaved ones.

    Args:
        scale: share of COCO's images. batch: captions per step. batches: steps per round for each window.
        sizes: overrides of the models' settings.
    """
    load_before = os.getloadavg()[0]
    progress("data")
    data = write_synthetic(folder, scale=scale)
    train = open_split(data, "train", load_vocabulary(data))
    lengths = train.caption_lengths.numpy()
    plans = {window: chosen_batches(lengths, window, batch, batches) for window in WINDOWS}
    found: dict[str, dict[str, list[float]]] = {}
    for label, settings in MODELS.items():
        torch.manual_seed(0)
        options = {"vocab_size": len(train.vocabulary), "feature_dim": 2048, **settings, **(sizes or {})}
        model = models.create(options.pop("name"), **options)
        optimizer, loss = torch.optim.Adam(model.parameters(), lr=1e-5), TripletLoss()

        def step(features: Any, captions: tuple[Tensor, Tensor], model: Any = model, loss: Any = loss,
                 optimizer: Any = optimizer) -> None:  # fmt: skip
            optimizer.zero_grad()
            loss(model(features, *captions)).backward()
            optimizer.step()

        found[label] = {str(window): [] for window in WINDOWS}
        for number in range(rounds + 1):
            progress(f"{label}: round {number} of {rounds}")
            for window, (chosen, _) in plans.items():
                seconds = 0.0
                for indices in chosen:
                    rows = torch.from_numpy(indices)
                    features, captions = train.image_batch(train.caption_image[rows]), train.caption_batch(rows)
                    start = time.process_time()
                    step(features, captions)
                    seconds += time.process_time() - start
                if number:
                    found[label][str(window)].append(seconds / batches)
    return {
        "format_version": FORMAT_VERSION,
        "environment": environment(torch.get_num_threads(), build_info()),
        "batch": batch,
        "batches": batches,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "padding_share": {str(window): share for window, (_, share) in plans.items()},
        "step_seconds": found,
    }


def markdown(results: Mapping[str, Any]) -> str:
    """Render padding, and a step of each model with its speedup, by the size of the window."""
    steps = results["step_seconds"]
    rows = [["`--bucket-batches`", "padding among the token ids", *(f"a step of {label}" for label in steps)]]
    for window, share in results["padding_share"].items():
        cells = [window, f"{share:.1%}"]
        for times in steps.values():
            gains = [plain / own for plain, own in zip(times["0"], times[window], strict=True)]
            cells.append(
                f"{statistics.median(times[window]):.2f} s, {statistics.median(gains):.2f}x as fast "
                f"[{min(gains):.2f}, {max(gains):.2f}]"
            )
        rows.append(cells)
    where, rounds = results["environment"], len(next(iter(steps.values()))["0"])
    return (
        f"{table(rows)}\n\nMeasured on {where['date'][:10]} with `{where['command']}` on {where['processor']}, torch "
        f"{where['torch']}: processor time of whole steps (both encoders, scores, loss, backward, Adam) on synthetic "
        f"captions of COCO's lengths, {results['batch']} per batch, {results['batches']} batches spread over all "
        f"lengths in each of {rounds} interleaved rounds after a warm-up round. Speedups are medians over the rounds, "
        f"smallest and largest in brackets. Load of the machine: {results['load_before']:.1f} before, "
        f"{results['load_after']:.1f} after.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark length bucketing.")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default 7)")
    parser.add_argument("--batches", type=int, default=3, help="steps per round for each size (default 3)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        results = run(
            Path(folder),
            scale=0.01,
            batch=128,
            batches=options.batches,
            rounds=options.rounds,
            progress=lambda what: print(what, file=sys.stderr, flush=True),
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
