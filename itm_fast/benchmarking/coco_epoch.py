"""A rehearsal of training at COCO's size on synthetic data: where the time of a step goes, and what an epoch takes.

Inside: `run`, `measure`, `measure_epoch`, `growth`, `Plan`, `PLANS`.

Each model trains by its published recipe, through the trainer, from a feature store; each in a process of its own, so
that its peak of memory is its own. Every so many steps the per-caption loop of published code does the same work on
the batches that follow.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch

from itm_fast.benchmarking.measure import kept_bytes
from itm_fast.benchmarking.published_loop import HAS_LOOP, published_loop
from itm_fast.benchmarking.rehearsal import RECIPES, Training
from itm_fast.benchmarking.run import environment
from itm_fast.data import pack, store_format
from itm_fast.data.synthetic import COCO_IMAGES, write_synthetic
from itm_fast.machine import described_device
from itm_fast.ops.library import build_info

__all__ = ["FORMAT_VERSION", "KIND", "PLANS", "Plan", "growth", "measure", "measure_epoch", "run"]

FORMAT_VERSION = 2
KIND = "itm_fast COCO rehearsal"
# Of an epoch; giving free memory back takes time that quick steps would show.
_MOST_READINGS = 64


@attrs.frozen
class Plan:
    """How much is measured.

    Attributes:
        models: of `RECIPES`.
        epoch_model: the one that trains for a whole epoch: that of the quickest step waits the most.
        scale: share of COCO's images.
        rounds, steps, loop_steps: rounds of so many steps, and then of so many of the loop.
        lead_in: steps before those of a round that are not measured, as the loop's steps left batches waiting.
        regions, width: of an image. sparse: leave most of each image zero, to spare the disk.
        batch, sizes: in the place of the recipe's batch size and settings of the model.
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
    """Times, phases and memory of a model's steps, and of the loop's where its published code has one.

    On a GPU the phases are those of further steps, in which each waits for the device: their sum is more than a step.
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
    """A whole epoch of a model: memory after every so many steps, time spent waiting; then batches without steps."""
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
    # The loader of the next epoch, whose batches nobody works on.
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
    """By how much of its mean memory grows over an epoch, by the least of it in the last two quarters.

    In the first half the memory of each thread grows to what the longest captions take, in steps that do not come back.
    Later a reading has more or less of it as captions were long or short; what stays behind raises the least.

    Args:
        memory: readings in bytes, the same number of steps apart, all over an epoch.
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
    """Writes data and store under `folder`, or takes those that are there, and measures; what the JSON file holds.

    Args:
        save: called with what is there after every model, so that an interrupted run leaves what it measured.
        limit_s: no model is begun when so many seconds have passed; those left out are listed.

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
    """What a function returns in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        return processes.submit(function, *arguments).result()


def _store(plan: Plan, folder: Path, progress: Callable[[str], None]) -> tuple[Path, dict[str, float] | None]:
    """The feature store of the data that are asked for, and what packing it took; None where it was there."""
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
        raise ValueError(f"{store}: expected {wanted} images, regions and numbers of a region, got {found}")
    return store, packing
