"""Rehearse training at COCO's size on synthetic data: the time of a step by phase, and the time of an epoch.

Inside: `run`, `measure`, `measure_epoch`, `growth`, `Plan`, `PLANS`.

Each model trains by its published recipe, with the trainer and a feature store, in a separate process with a separate
memory peak. At intervals the per-caption loop of published code does the same work on the batches that follow.

python -m benchmarks.coco_epoch --json benchmarks/results/coco_epoch.json            # a CPU: a quarter of an hour
python -m benchmarks.coco_epoch --plan full --device cuda --folder DIR --json FILE   # a GPU: 20 GB of disk in DIR
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch

from benchmarks.coco_table import FORMAT_VERSION, KIND, markdown
from benchmarks.machine import described_device, kept_bytes
from benchmarks.published_loop import HAS_LOOP, published_loop
from benchmarks.rehearsal import RECIPES, Training
from itm_fast.data import pack, store_format
from itm_fast.data.synthetic import COCO_IMAGES, write_synthetic
from itm_fast.files.atomic import write_text
from itm_fast.files.environment import environment
from itm_fast.ops.library import build_info

__all__ = ["PLANS", "Plan", "growth", "measure", "measure_epoch", "run"]

# Per epoch; returning free memory takes time that would show in quick steps.
_MOST_READINGS = 64


@attrs.frozen
class Plan:
    """How much is measured.

    Attributes:
        models: names in `RECIPES`.
        epoch_model: the model that trains for a whole epoch: the one with the shortest step waits most for data.
        scale: share of COCO's images.
        rounds, steps, loop_steps: rounds, steps per round, and steps of the loop per round.
        lead_in: unmeasured steps before each round, because batches queue up during the loop's steps.
        regions, width: of an image. sparse: leave most of each image zero, to save disk space.
        batch, sizes: overrides of the recipe's batch size and of model settings.
        dry: the figures mean nothing.
    """

    models: tuple[str, ...]
    epoch_model: str = "VSE-infinity"
    scale: float = 1.0
    rounds: int = 3
    steps: int = 30
    loop_steps: int = 2
    lead_in: int = 5
    regions: int = 36
    width: int = 2048
    sparse: bool = True
    batch: int | None = None
    sizes: dict[str, int] = attrs.field(factory=dict)
    dry: bool = False


PLANS = {
    "full": Plan(tuple(RECIPES)),
    "cpu": Plan(
        ("SCAN t2i", "RCAR t2i", "SGR", "DBL", "VSE-infinity"),
        scale=0.01, steps=1, loop_steps=1, lead_in=0, sparse=False,
    ),
    "dry": Plan(
        ("SCAN t2i", "VSE-infinity"),
        scale=0.0005, rounds=2, steps=2, loop_steps=1, lead_in=1, regions=4, width=8, batch=16,
        sizes={"embed_dim": 16, "word_dim": 12}, dry=True,
    ),
}  # fmt: skip


def measure(label: str, plan: Plan, store: Path, device: str, threads: int) -> dict[str, Any]:
    """Measure times, phases and memory of a model's steps, and of the loop's if the published code has one.

    On a GPU, phases are measured in additional steps that synchronise after each phase, so their sum exceeds a step.
    """
    torch.set_num_threads(threads)
    training = Training(label, store, device, plan.batch, plan.sizes)
    config, mining = training.config, training.config.mining
    native: dict[str, Any] = {"seconds": [], "waiting": [], "phases": dict.fromkeys(training.clock.seconds, 0.0)}
    loop: dict[str, Any] = {"seconds": []}
    training.reset_peaks()
    training.advance(1, mining)
    for number in range(plan.rounds):
        seconds, phases = training.timed(plan.steps, mining, plan.lead_in, exact=not training.on_gpu)
        native["seconds"].append(seconds / plan.steps)
        native["waiting"].append(phases["waiting"] / seconds)
        if training.on_gpu:
            _, phases = training.timed(plan.steps, mining, 0, exact=True)
        for name, value in phases.items():
            native["phases"][name] += value
        if number == 0:
            native |= training.peaks()
        if config.model in HAS_LOOP:
            with published_loop():
                training.reset_peaks()
                seconds, _ = training.timed(plan.loop_steps, mining, 0, exact=False)
            loop["seconds"].append(seconds / plan.loop_steps)
            if number == 0:
                loop |= training.peaks()
    warm_up = None
    if config.warmup_epochs:
        seconds, _ = training.timed(plan.loop_steps, "all", plan.lead_in, exact=False)
        warm_up = {"seconds": [seconds / plan.loop_steps]}
    return {
        "recipe": RECIPES[label],
        "batch": config.batch_size,
        "drop_last": config.drop_last,
        "epochs": config.epochs,
        "warmup_epochs": config.warmup_epochs,
        "parameters": sum(one.numel() for one in training.trainer.model.parameters()),
        "placement": str(training.trainer.placement),
        "native": native,
        "loop": loop if loop["seconds"] else None,
        "warm_up": warm_up,
    }


def measure_epoch(label: str, plan: Plan, store: Path, device: str, threads: int) -> dict[str, Any]:
    """Train a model for a whole epoch: memory at intervals, time spent waiting; then batches without steps."""
    torch.set_num_threads(threads)
    training = Training(label, store, device, plan.batch, plan.sizes)
    steps, mining = training.trainer.steps_per_epoch, training.config.mining
    memory: list[int] = []
    every, taken = -(-steps // _MOST_READINGS), itertools.count(1)

    def read() -> None:
        if next(taken) % every == 0:
            memory.append(kept_bytes())

    start = time.perf_counter()
    training.advance(steps, mining, after=read)
    training.synchronize()
    seconds = time.perf_counter() - start
    waiting = training.clock.seconds["waiting"]
    data = training.trainer.train_data
    numbers = [value for value in vars(data).values() if isinstance(value, torch.Tensor)]
    texts = sum(sys.getsizeof(caption) + 8 for caption in data.captions)
    # The loader of the next epoch; its batches are not used.
    batches = training.trainer.batches()
    next(batches)
    count = min(steps - 1, 40)
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    reading = time.perf_counter() - start
    return {
        "model": label,
        "steps": steps,
        "captions": len(data),
        "seconds": seconds,
        "waiting_share": waiting / seconds,
        "memory_bytes": memory,
        "growth": growth(memory),
        "reading_seconds": reading / count,
        "caption_bytes": (sum(one.nbytes for one in numbers) + texts) / len(data),
    }


def growth(memory: list[int]) -> float:
    """Return the growth of memory over an epoch, relative to its mean: last against third quarter, by their minima.

    In the first half, the memory of each thread grows to the size that the longest captions need. Later readings vary
    with the length of captions; a leak raises their minimum.

    Args:
        memory: readings in bytes at equal intervals over an epoch.
    """
    quarter = len(memory) // 4
    before, last = memory[-2 * quarter : -quarter], memory[-quarter:]
    return (min(last) - min(before)) / quarter * len(memory) / statistics.fmean([*before, *last])


def run(
    plan: Plan,
    folder: Path,
    device: str,
    threads: int,
    *,
    progress: Callable[[str], None] = lambda _: None,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
    limit_s: float = float("inf"),
) -> dict[str, Any]:
    """Write data and store under `folder`, or reuse existing ones, and measure; return the content of the JSON file.

    Args:
        save: called with the results so far after every model, so that an interrupted run keeps what it measured.
        limit_s: start no model after this many seconds; models left out are listed.

    Raises:
        ValueError: `folder` holds a store of other data.
    """
    began = time.monotonic()
    store, packing = _store(plan, folder, progress)
    record = store_format.read_manifest(store).split("train")
    assert record is not None
    results: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "dry_run": plan.dry,
        "device": described_device(torch.device(device).type),
        "environment": environment(threads, build_info()),
        "plan": attrs.asdict(plan),
        "images": record.images,
        "captions": record.captions,
        "store_bytes": sum(shard.bytes for shard in record.shards),
        "packing": packing,
        "load_before": os.getloadavg()[0],
        "models": {},
        "epoch": None,
        "not_run": [],
    }
    for label in plan.models:
        if time.monotonic() - began > limit_s:
            results["not_run"].append(label)
            continue
        progress(label)
        results["models"][label] = _apart(measure, label, plan, store, device, threads)
        save(results)
    if time.monotonic() - began > limit_s:
        results["not_run"].append("a whole epoch")
    else:
        progress(f"an epoch of {plan.epoch_model}")
        results["epoch"] = _apart(measure_epoch, plan.epoch_model, plan, store, device, threads)
    results["load_after"] = os.getloadavg()[0]
    save(results)
    return results


def _apart(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Return the result of a function in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        return processes.submit(function, *arguments).result()


def _store(plan: Plan, folder: Path, progress: Callable[[str], None]) -> tuple[Path, dict[str, float] | None]:
    """Return the feature store of the requested data, and the time to pack it; None if it existed."""
    data, store = folder / "data", folder / "store"
    wanted = (max(round(COCO_IMAGES["train"] * plan.scale), 1), plan.regions, plan.width)
    packing = None
    if not store_format.is_store(store):
        progress("data")
        write_synthetic(data, scale=plan.scale, regions=plan.regions, width=plan.width, sparse=plan.sparse)
        progress("packing")
        start = time.perf_counter()
        pack(data, store, dtype="bf16", splits=["train", "dev"])
        source = sum((data / f"{split}_ims.npy").stat().st_size for split in ("train", "dev"))
        packing = {"seconds": time.perf_counter() - start, "source_bytes": float(source)}
    record = store_format.read_manifest(store).split("train")
    found = None if record is None else (record.images, record.regions, record.width)
    if found != wanted:
        raise ValueError(f"{store}: expected {wanted} images, regions and numbers per region, got {found}")
    return store, packing


def main() -> None:
    parser = argparse.ArgumentParser(description="Rehearse training at COCO's size.")
    parser.add_argument("--plan", choices=list(PLANS), default="cpu", help="how much is measured (default cpu)")
    parser.add_argument(
        "--models", nargs="+", choices=list(RECIPES), metavar="NAME", help="only these models of the plan"
    )
    parser.add_argument("--scale", type=float, help="share of COCO's images (default: the plan's)")
    parser.add_argument("--device", default="cpu", help="where to train (default cpu)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--json", type=Path, help="write all figures to this file, after each model")
    parser.add_argument(
        "--folder", type=Path, help="keep data and store in this folder, or reuse those of an earlier call"
    )
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no model after this many seconds")
    options = parser.parse_args()
    plan = PLANS[options.plan]
    changes = {name: value for name in ("models", "scale") if (value := getattr(options, name)) is not None}
    if changes:
        plan = attrs.evolve(plan, **{**changes, **({"models": tuple(options.models)} if options.models else {})})

    def save(results: dict[str, Any]) -> None:
        if options.json is not None:
            write_text(options.json, json.dumps(results, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        results = run(
            plan,
            options.folder or Path(folder),
            options.device,
            options.threads or torch.get_num_threads(),
            progress=lambda what: print(what, file=sys.stderr, flush=True),
            save=save,
            limit_s=options.limit_s,
        )
    print(f"{len(results['models'])} models rehearsed" if results["dry_run"] else markdown(results))


if __name__ == "__main__":
    main()
