"""Train one model by its recipe, a few steps at a time. Inside: `Training`, `RECIPES`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.step_clock import StepClock, watch
from itm_fast import config as settings
from itm_fast.benchmarking.measure import reset_peak, status_bytes
from itm_fast.data import Batch
from itm_fast.training import TrainConfig, recipes
from itm_fast.training.creation import create_model
from itm_fast.training.run import load_data
from itm_fast.training.trainer import Trainer

__all__ = ["RECIPES", "Training"]

# Recipes by model.
RECIPES = {
    "SCAN t2i": "scan-t2i-coco",
    "SCAN i2t": "scan-i2t-coco",
    "RCAR t2i": "rcar-t2i-coco",
    "SGR": "sgr-coco",
    "SAF": "saf-coco",
    "DBL": "dbl-coco",
    "VSE-infinity": "vse-infty-coco",
    "BFAN": "bfan-equal-coco",
    "VSE++": "vsepp-coco",
    "VSRN": "vsrn-coco",
    "RVSE++": "rvsepp-coco",
    "NAAF": "naaf-coco",
    "ESA": "esa-coco",
}


class _Rehearsal(Trainer):
    """A trainer that takes steps on request."""

    def batches(self) -> Iterator[Batch]:
        return self._batches(0)

    def step(self, batch: Batch, mining: str) -> dict[str, float]:
        return self._step(batch, mining)


class Training:
    """Create a trainer as `itm_fast.training.train` does, and the clock of its steps; writes nothing.

    Args:
        label: a key of `RECIPES`. data: folder or store. device: where it trains.
        batch, sizes: overrides of the recipe's batch size and of model settings.
    """

    def __init__(self, label: str, data: Path, device: str, batch: int | None, sizes: Mapping[str, int]) -> None:
        recipe = recipes.load(RECIPES[label])
        changes: dict[str, Any] = {"data": str(data), "out": str(data), "device": device, "model_options": sizes}
        if batch is not None:
            changes["batch_size"] = batch
        self.config = settings.build(TrainConfig, recipes.merge(recipe.settings, changes)).resolved()
        vocabulary, train_data, validation_data = load_data(self.config)
        torch.manual_seed(self.config.seed)
        model = create_model(self.config, vocabulary, train_data)
        self.trainer = _Rehearsal(self.config, model, train_data, validation_data, progress=False)
        self.clock = StepClock()
        watch(self.trainer.model, self.trainer.stepper, self.clock)
        self.on_gpu = self.trainer.device.type == "cuda"
        self.batches = self.trainer.batches()

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.trainer.device)

    def advance(self, steps: int, mining: str, *, after: Callable[[], object] = lambda: None) -> None:
        """Take steps, and call `after` after each."""
        for _ in range(steps):
            self.clock.switch("waiting")
            batch = next(self.batches)
            self.clock.switch("batch")
            self.trainer.step(batch, mining)
            self.clock.switch("waiting")
            after()

    def timed(self, steps: int, mining: str, lead_in: int, *, exact: bool) -> tuple[float, dict[str, float]]:
        """Return seconds of the steps after `lead_in`, and of each phase; phases are only accurate if `exact`.

        The time spent waiting for a batch and the sum of all phases are accurate in both cases.
        """
        self.clock.synchronize = lambda: None
        self.advance(lead_in, mining)
        self.synchronize()
        self.clock.reset()
        if exact:
            self.clock.synchronize = self.synchronize
        self.clock.switch("waiting")
        start = self.clock.since
        self.advance(steps, mining)
        self.synchronize()
        self.clock.switch(None)
        return self.clock.since - start, self.clock.seconds

    def reset_peaks(self) -> None:
        reset_peak()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.trainer.device)

    def peaks(self) -> dict[str, int | None]:
        """Return bytes: the peak memory of this process, and torch's on the GPU."""
        device = torch.cuda.max_memory_allocated(self.trainer.device) if self.on_gpu else None
        return {"peak_host_bytes": status_bytes("VmHWM"), "peak_device_bytes": device}
