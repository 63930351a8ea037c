"""The training loop: what happens around the optimiser steps.

Inside: `Trainer`, `TrainResult`.
"""

from __future__ import annotations

import functools
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from ignite.engine import Engine, Events
from tqdm import tqdm

from itm_fast.data import Batch, BatchLoader, EpochSampler, PrecomputedDataset
from itm_fast.data.placement import place
from itm_fast.distributed import World
from itm_fast.evaluation import evaluate
from itm_fast.models.base import MatchingModel, load_weights
from itm_fast.training import checkpoint, run_folder
from itm_fast.training.config import TrainConfig
from itm_fast.training.fingerprint import check_fingerprints, fingerprints
from itm_fast.training.metrics_log import MetricsLog, read_metrics
from itm_fast.training.phases import Phases
from itm_fast.training.shares import Shares, shared
from itm_fast.training.signals import on_stop_signals
from itm_fast.training.state_check import check_like, check_progress, check_summary
from itm_fast.training.step import Stepper
from itm_fast.training.tensorboard import TensorBoardLog

__all__ = ["TrainResult", "Trainer"]

_STATE_KEYS = (
    "position", "data", "model", "optimizer", "scheduler", "plateau", "random", "best", "best_step",
    "validated_step", "window", "seconds", "log_size",
)  # fmt: skip
# Where a line of the log belongs; its other keys are the validation's summary.
_VALIDATION_KEYS = ("kind", "split", "step", "epoch", "seconds")


@attrs.frozen
class TrainResult:
    """What a run came to. `best` is the best validation's summary; `finished` is False where a signal stopped it."""

    best: dict[str, float]
    best_step: int
    steps: int
    seconds: float
    finished: bool


class Trainer:
    """Trains `model` as `config` says and keeps the RUN folder `config.out`, which must exist when `run` is called.

    `anchor` is the frozen model that the scenario oas trains beside. Where several processes train together, `world`,
    each has a trainer of the same arguments, and the first alone writes.

    The order of the data depends on (seed, epoch) alone and the learning rate on the step alone, so that a run that is
    interrupted and resumed ends bit for bit where an uninterrupted one does.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: MatchingModel,
        train_data: PrecomputedDataset,
        validation_data: PrecomputedDataset,
        *,
        anchor: MatchingModel | None = None,
        progress: bool = True,
        world: World | None = None,
    ) -> None:
        self.config, self.world = config, world or World()
        self.device = torch.device(self.world.device(config.device))
        self.model = model.to(self.device)
        anchor = None if anchor is None else anchor.to(self.device)
        self.train_data, self.validation_data = train_data, validation_data
        batches = len(EpochSampler(len(train_data), config.batch_size, drop_last=config.drop_last))
        if batches == 0:
            raise ValueError(f"batch_size: {config.batch_size} is more than the {len(train_data)} training captions")
        processes = self.world.launch.local_size
        train_data.source, self.placement = place(train_data.source, config.features, self.device, processes)
        # A product in bfloat16 takes them as they are.
        train_data.source.keep_bfloat16 = config.precision == "bfloat16"
        self.phases = Phases.of(config, batches)
        self.steps_per_epoch = self.phases.steps_per_epoch
        self.stepper = Stepper(
            config,
            self.model,
            train_data.vocabulary,
            self.device,
            batches,
            anchor,
            image_rows=train_data.image_batch,
            n_images=train_data.n_images,
            world=self.world,
        )
        # Models start the same everywhere, and what is drawn from here on differs.
        if self.world.rank > 0:
            checkpoint.seed_process(config.seed, 0, self.world.rank)
        self.log = MetricsLog(Path(config.out) / run_folder.METRICS)
        self.tensorboard: TensorBoardLog | None = None
        if config.tensorboard and self.world.first:
            self.tensorboard = TensorBoardLog(Path(config.out) / run_folder.TENSORBOARD)
        # What a resumed run says of its random numbers.
        self.random_note = ""
        self.best: dict[str, float] = {}
        self.best_step = 0
        self._total = config.epochs * self.steps_per_epoch
        self._position = 0
        self._validated_step = 0
        self._log_size = 0
        self._window: list[float] = []
        self._seconds_before = 0.0
        self._started = time.monotonic()
        self._stop_requested = self._stop_agreed = False
        self._bar = tqdm(disable=True)
        self._progress = progress and self.world.first
        self.engine = self._make_engine()

    def restore(self) -> None:
        """Takes up the last state of the run in `config.out`; `run` then goes on from there. Writes nothing.

        Raises:
            ValueError: the state is missing or damaged, or does not fit the model, the data or the epochs.
        """
        path = Path(self.config.out) / checkpoint.STATE_FILE
        # Ordinary training has no such entry, nor had any state before there were scenarios.
        scenario = ("scenario",) if self.stepper.scenario.has_state else ()
        state = checkpoint.load_state(self.config.out, (*_STATE_KEYS, *scenario))
        check_fingerprints(state["data"], self._fingerprints, path)
        if state["position"] > self._total:
            raise ValueError(
                f"epochs: {self.config.epochs} epochs are {self._total} steps, but the run in {self.config.out} has "
                f"done {state['position']}"
            )
        load_weights(self.model, state["model"], str(path))
        try:
            check_like(state["model"], self.model.state_dict(), "model")
            check_progress(state)
            self.stepper.load_state_dict(state, state["position"])
            self.random_note = checkpoint.restore_random_states(state, self.world, self.config.seed, self.device)
        except ValueError as error:
            raise ValueError(f"{path}: the training state is damaged: {error}") from None
        self.stepper.scenario.load_files(self.config.out, self._data)
        self.best, self.best_step = state["best"], state["best_step"]
        self._position, self._validated_step = state["position"], state["validated_step"]
        self._window, self._seconds_before = list(state["window"]), state["seconds"]
        self._log_size = state["log_size"]
        self._take_up_validation()

    def _take_up_validation(self) -> None:
        """Takes a validation of the very state that was read from the log, which has it first (see `_validate`)."""
        found = self.log.line_at(self._log_size)
        if found is None:
            return
        line, end = found
        if line.get("kind") == "validation" and line.get("step") == self._position:
            summary = {key: value for key, value in line.items() if key not in _VALIDATION_KEYS}
            check_summary(summary, f"{self.log.path}: the validation after step {self._position}")
            self._judge(summary, self._position)
            self._log_size = end

    def run(self) -> TrainResult:
        """Trains to the end, or until SIGINT or SIGTERM asks for a stop, and leaves a state to resume from.

        Raises:
            ValueError: the loss is not finite, or a batch is bad.
        """
        self._warn_without_negatives()
        self._started = time.monotonic()
        if self.world.first:
            self.log.truncate(self._log_size)
        if self.tensorboard is None:
            return self._run()
        lines = read_metrics(self.log.path, ("kind", "step", "seconds")) if self.log.size else []
        self.tensorboard.start(lines, self._seconds_before)
        try:
            return self._run()
        finally:
            self.tensorboard.close()

    def _run(self) -> TrainResult:
        # A run that ended in the middle of a validation makes up for it.
        if self._validation_due(self._position):
            self._validate(self._position)
        if self._position < self._total:
            self.engine.load_state_dict(
                {"iteration": self._position, "epoch_length": self.steps_per_epoch, "max_epochs": self.config.epochs}
            )
            # Where no terminal shows a bar there is none, but the lines of the validations stay.
            with (
                on_stop_signals(self._request_stop, repeated=self.world.size > 1),
                tqdm(
                    total=self._total,
                    initial=self._position,
                    unit="step",
                    disable=None if self._progress else True,
                ) as self._bar,
            ):
                self.engine.run(self._batches(self._position))
            self._position = self.engine.state.iteration
        return TrainResult(self.best, self.best_step, self._position, self.seconds, self._position >= self._total)

    @property
    def seconds(self) -> float:
        """Time spent in this run so far, what came before a resume included."""
        return self._seconds_before + time.monotonic() - self._started

    def seconds_per_step(self, mining: str, steps: int = 5) -> float:
        """Measures steps with the negatives `mining` on the first batches.

        The steps change the weights: only for a trainer that will not train.
        """
        batches = self._batches(0)
        times = []
        for batch in itertools.islice(batches, steps + 2):
            start = time.perf_counter()
            self._step(batch, mining)
            times.append(time.perf_counter() - start)
        # The first two steps warm up memory and threads.
        return statistics.median(times[2:] or times)

    def _make_engine(self) -> Engine:
        engine = Engine(lambda _engine, batch: self._step(batch))
        # Ignite would log every exception to stderr beside the one clear line that the user gets.
        engine.logger.setLevel(logging.CRITICAL)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._after_step)
        return engine

    def _batches(self, position: int) -> Iterator[Batch]:
        """The batches from step `position` on; where one process cannot read its part, or shall stop, all know."""
        batches = self._read_batches(position)
        while True:
            batch: Batch | None = None
            error: Exception | None = None
            try:
                batch = next(batches)
            except (ValueError, OSError) as raised:
                error = raised
            self._stop_agreed = self.world.agree(error, stop=self._stop_requested)
            if batch is not None:
                yield batch

    def _read_batches(self, position: int) -> Iterator[Batch]:
        """The own part of the batches from step `position` on, epoch after epoch."""
        config = self.config
        for part in self.phases.passes(position):
            sampler = EpochSampler(
                len(self.train_data),
                config.batch_size,
                seed=config.seed,
                epoch=part.order,
                drop_last=config.drop_last,
                start_batch=part.start,
                lengths=self.train_data.caption_lengths.numpy(),
                bucket_batches=config.bucket_batches,
            )
            own = sampler if self.world.size == 1 else Shares(sampler, self.world)
            loader = BatchLoader(self.train_data, own, workers=config.workers, pin_memory=self.device.type == "cuda")
            # A loader draws a seed for its workers from torch's generator, which dropout draws from, too.
            with torch.random.fork_rng(devices=[]):
                batches = shared(loader, sampler, self.train_data.caption_image, self.world)
                first = next(batches)
            yield from itertools.repeat(first, part.repeats - part.done)
            for batch in batches:
                yield from itertools.repeat(batch, part.repeats)

    def _step(self, batch: Batch, mining: str | None = None) -> dict[str, float]:
        step = self.engine.state.iteration
        return self.stepper(batch, mining or self.mining, step, diagnose=self._log_due(step))

    @property
    def mining(self) -> str:
        """The negatives of the present epoch; epochs count from 1 once the run has started."""
        return "all" if max(self.engine.state.epoch, 1) <= self.config.warmup_epochs else self.config.mining

    def _after_step(self, engine: Engine) -> None:
        step = engine.state.iteration
        output: dict[str, float] = engine.state.output  # type: ignore[assignment]
        if "loss" in output:
            self._window.append(output["loss"])
        if self._log_due(step):
            self._log_window(output)
        loss = output.get("loss", output.get("discriminator_loss"))
        self._bar.set_postfix(loss=f"{loss:.2f}", rsum=f"{self.best.get('rsum', 0.0):.1f}", refresh=False)
        self._bar.update()
        due = self._validation_due(step)
        # What a validation that fails would lose is saved before it.
        save = due or self._stopping or step % self.steps_per_epoch == 0 or step % self.config.save_every == 0
        if save:
            self._save(step)
        if due:
            self._validate(step)
        # A stop that was asked for after the choice to save waits for the next step.
        if save and self._stopping:
            engine.terminate()

    @property
    def _stopping(self) -> bool:
        """Whether this step is the last: of several processes all must know it before the step."""
        return self._stop_agreed or (self.world.size == 1 and self._stop_requested)

    def _log_due(self, step: int) -> bool:
        return step > 0 and (step % self.config.log_every == 0 or step == self._total)

    def _validation_due(self, step: int) -> bool:
        """Whether a validation belongs after `step` and has not been done."""
        unit = self.steps_per_epoch if self.config.validate_unit == "epoch" else 1
        regular = step % (self.config.validate_every * unit) == 0
        return step > 0 and step != self._validated_step and (regular or step == self._total)

    def _log_window(self, output: dict[str, float]) -> None:
        loss = {}
        # A step of a phase that is not the model's has none: what came before it waits for the model's next line.
        if "loss" in output:
            loss["loss"] = sum(self._window) / len(self._window)
            self._window.clear()
        self._write(
            kind="train",
            step=self.engine.state.iteration,
            epoch=self.engine.state.epoch,
            mining=self.mining,
            **{**output, **loss},
            seconds=round(self.seconds, 3),
        )

    def _validate(self, step: int) -> None:
        epoch = -(-step // self.steps_per_epoch)
        with self.stepper.autocast():
            summary = evaluate(
                self.model,
                self.validation_data,
                progress=self._progress,
                description=self.validation_data.split,
                world=self.world,
            )
        better = self._judge(summary, step)
        with self.world.together():
            if better and self.world.first:
                others = self.stepper.scenario.companions()
                run_folder.save_models(self.config.out, self.model, others, self.train_data.vocabulary)
        # Last, because a validation that the log has is not repeated on a resume: the state is large, and writing it a
        # second time for the validation's sake would double the cost of saving.
        position = {"split": self.validation_data.split, "step": step, "epoch": epoch}
        self._write(kind="validation", **position, seconds=round(self.seconds, 3), **summary)
        if self._progress:
            self._bar.write(
                f"epoch {epoch}, step {step}: {self.validation_data.split} rsum {summary['rsum']:.1f}, R@1 "
                f"{summary['i2t_r1']:.1f} (image to text) {summary['t2i_r1']:.1f} (text to image)"
                + (f", MD {summary['mean_distance']:.2f}" if "mean_distance" in summary else "")
                + ", best" * better
            )

    def _write(self, **line: Any) -> None:
        if not self.world.first:
            return
        self.log.write(**line)
        if self.tensorboard is not None:
            self.tensorboard.write(line)

    def _judge(self, summary: dict[str, float], step: int) -> bool:
        """Notes a validation of the weights after `step`; whether they are the best so far."""
        self._validated_step = step
        better = not self.best or summary["rsum"] > self.best["rsum"]
        if better:
            self.best, self.best_step = summary, step
        return better

    def _save(self, step: int) -> None:
        random = checkpoint.random_states(self.world, self.device)
        with self.world.together():
            if self.world.first:
                self._write_state(step, random)

    def _write_state(self, step: int, random: dict[str, Any]) -> None:
        # The state says how long the log is, and must not be on disk before it.
        self.log.flush_to_disk()
        state = {
            "position": step,
            "data": self._fingerprints,
            "model": self.model.state_dict(),
            **self.stepper.state_dict(),
            **random,
            "best": self.best,
            "best_step": self.best_step,
            "validated_step": self._validated_step,
            "window": list(self._window),
            "seconds": self.seconds,
            "log_size": self.log.size,
        }
        scenario = self.stepper.scenario
        scenario.save_files(self.config.out, self._data)
        checkpoint.save_state(self.config.out, state)
        scenario.forget_files(self.config.out)

    @property
    def _data(self) -> str:
        """Tells the training split from any other, for what is saved beside the state."""
        return self._fingerprints[f"{self.train_data.split}_caps.txt"]

    @functools.cached_property
    def _fingerprints(self) -> dict[str, str]:
        found = {**fingerprints(self.train_data), **fingerprints(self.validation_data)}
        if self.config.bert is not None:
            # The shapes of the weights say all of BERT's sizes but this one.
            found["config.json of the BERT model"] = f"num_attention_heads {self.model.encoder_config.bert_heads}"
        return found

    def _warn_without_negatives(self) -> None:
        one_image = self.config.exclude_same_image and len(self.train_data.caption_image.unique()) == 1
        if one_image or min(self.config.batch_size, len(self.train_data)) == 1:
            reason = "all captions are of one image" if one_image else "a step has one caption"
            warnings.warn(f"nothing can be learned: {reason}, and so no pair has a negative", stacklevel=3)

    def _request_stop(self) -> None:
        self._stop_requested = True
