"""One model on its way through the steps of its recipe, a few at a time. Inside: `Training`, `RECIPES`."""

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
from itm_fast.training.run import create_model, load_data
from itm_fast.training.trainer import Trainer

__all__ = ["RECIPES", "Training"]

# The models by the recipes that train them.
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
}


class _Rehearsal(Trainer):
    """A trainer whose steps are asked for one at a time."""

    def batches(self) -> Iterator[Batch]:
        return self._batches(0)

    def step(self, batch: Batch, mining: str) -> dict[str, float]:
        return self._step(batch, mining)


class Training:
    """A trainer made as `itm_fast.training.train` makes it, and the clock of its steps; nothing is written.

    Args:
        label: of `RECIPES`. data: folder or store. device: where it trains.
        batch, sizes: in the place of the recipe's batch size and settings of the model.
    """

    def __init__(self, label: str, data: Path, device: str, batch: int | None, sizes: Mapping[str, int]) -> None:
        recipe = recipes.load(RECIPES[label])
        changes: dict[str, Any] = {"data": str(data), "out": str(data), "device": device, "model_options": sizes}
        if batch is not None:
            changes["batch_size"] = batch
        self.config = settings.build(TrainConfig, recipes.merge(recipe.settings, changes))
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
        """Takes steps, and calls `after` behind each."""
        for _ in range(steps):
            self.clock.switch("waiting")
            batch = next(self.batches)
            self.clock.switch("batch")
            self.trainer.step(batch, mining)
            self.clock.switch("waiting")
            after()

    def timed(self, steps: int, mining: str, lead_in: int, *, exact: bool) -> tuple[float, dict[str, float]]:
        """Seconds of steps behind those of `lead_in`, and of each phase, which are true where they are `exact`.

        The time that passes until a batch is there is true in either case, and so is the sum of all phases.
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
        """Bytes: the most that this process had in memory, and what torch had on the GPU."""
        device = torch.cuda.max_memory_allocated(self.trainer.device) if self.on_gpu else None
        return {"peak_host_bytes": status_bytes("VmHWM"), "peak_device_bytes": device}
