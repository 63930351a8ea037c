"""The training loop: batches, logging, validation and saving around the optimiser steps.

Inside: `Trainer`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from tqdm import tqdm

from itm_fast.data import Batch, EpochSampler, PrecomputedDataset
from itm_fast.data.placement import Placement, host_room, place
from itm_fast.distributed import World, copy_from_first
from itm_fast.evaluation import Gallery, evaluate
from itm_fast.models.base import MatchingModel, load_weights
from itm_fast.training import checkpoint, run_folder
from itm_fast.training.backbone import check_pictures
from itm_fast.training.config import TrainConfig
from itm_fast.training.fingerprint import (
    check_fingerprints,
    check_made_with,
    fingerprints,
    made_with,
    model_fingerprint,
)
from itm_fast.training.own import as_data, as_loss, as_model, check_settings, fitting_vocabulary
from itm_fast.training.phases import Phases
from itm_fast.training.progress import Progress, TrainResult
from itm_fast.training.reading import read_batches
from itm_fast.training.run_log import RunLog
from itm_fast.training.signals import on_stop_signals
from itm_fast.training.state_check import check_like, check_progress
from itm_fast.training.step import Stepper
from itm_fast.training.trackers import trackers

__all__ = ["Trainer"]

# Minimum seconds between two lines that replace the progress bar.
_LINE_SECONDS = 5.0
_STATE_KEYS = ("data", "model", "optimizer", "scheduler", "plateau", "random", *Progress.KEYS)


class Trainer:
    """Train `model` as `config` says. `run` writes to the run directory `config.out`, which must exist.

    `itm_fast.training.train` makes one, creates and checks the directory, and runs it. The model may be any module with
    `encode_images`, `encode_captions` and `score`; the data sets any `itm_fast.evaluation.Gallery`; and `loss` any
    function of the scores, which then replaces the loss of `config` (see `itm_fast.training.train`).

    `anchor` is the frozen model of the scenario oas. If several processes (`world`) train together, each has a trainer
    with the same arguments, and only the first writes files. All start from the weights of the first.

    The data order depends only on (seed, epoch) and the learning rate only on the step, so that an interrupted and
    resumed run gives bit for bit the result of an uninterrupted one.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        train_data: Gallery,
        validation_data: Gallery,
        *,
        loss: Callable[..., Tensor] | None = None,
        anchor: MatchingModel | None = None,
        progress: bool = True,
        world: World | None = None,
    ) -> None:
        self.config = config = config.resolved()
        self.world = world or World()
        self.device = torch.device(self.world.device(config.device))
        self.model = as_model(model).to(self.device)
        self._own_loss = loss is not None
        anchor = None if anchor is None else anchor.to(self.device)
        self.train_data = train_data = as_data(train_data, "train")
        self.validation_data = as_data(validation_data, config.validation_split)
        check_settings(config, self.model, train_data, own_loss=self._own_loss)
        batches = len(EpochSampler(len(train_data), config.batch_size, drop_last=config.drop_last))
        if batches == 0:
            raise ValueError(f"batch_size: {config.batch_size} is more than the {len(train_data)} training captions")
        self._talks = progress and self.world.first
        self.vocabulary = fitting_vocabulary(self.model, train_data)
        self._kept_before = train_data.source.keep_bfloat16
        self.placement: Placement | None = None
        if isinstance(train_data, PrecomputedDataset):
            where = config.features
            if config.picture_augmentation != "none":
                check_pictures(config, train_data)
                where = "disk"
            train_data.source, self.placement = place(
                train_data.source, where, self.device, self.world, progress=self._talks
            )
            if where != config.features:
                self.placement = Placement("disk", "picture_augmentation changes pictures as they are read")
        self.phases = Phases.of(config, batches)
        self.steps_per_epoch = self.phases.steps_per_epoch
        own_loss = None if loss is None else as_loss(loss).to(self.device)
        # A user's modules may start with other weights in each process.
        copy_from_first(self.model, self.world)
        if own_loss is not None:
            copy_from_first(own_loss, self.world)
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
            room=host_room(self.world) if config.trains_discriminators else None,
            loss=own_loss,
            data=train_data,
            validation_data=self.validation_data,
        )
        self._made_with = made_with(self.model, own_loss)
        # Models start equal in all processes; random numbers drawn from here on differ.
        if self.world.rank > 0:
            checkpoint.seed_process(config.seed, 0, self.world.rank)
        first = self.world.first
        self.log = RunLog(config.out, trackers=trackers(config) if first else (), writes=first)
        # Notes of a resumed run about its random numbers.
        self.random_note = ""
        self.progress = Progress()
        self._total = self._total_before = config.epochs * self.steps_per_epoch
        self._stop_requested = self._stop_agreed = False
        self._bar = tqdm(disable=True)
        self._started, self._printed = (0, time.monotonic()), 0.0
        self.engine = self._make_engine()
        # bfloat16 products need no float32 copy. The data belong to the caller, so this is undone after the run.
        train_data.source.keep_bfloat16 = config.precision == "bfloat16"

    def restore(self) -> None:
        """Restore the last state of the run in `config.out`, from which `run` then continues. Writes nothing.

        Raises:
            ValueError: the state is missing or damaged, or does not fit the model, the data or the epochs.
        """
        with self._own_data(after=False):
            self._restore()

    def _restore(self) -> None:
        path = Path(self.config.out) / checkpoint.STATE_FILE
        # Ordinary training has no such entry.
        scenario = ("scenario",) if self.stepper.scenario.has_state else ()
        state = checkpoint.load_state(self.config.out, (*_STATE_KEYS, *scenario))
        check_fingerprints(state["data"], self._fingerprints, path)
        check_made_with(state.get("made_with"), self._made_with, path)
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
        self.progress = Progress.of(state)
        # Fewer epochs may have ended here. Their last validation may be unfinished, after it saved the best model.
        self._total_before = state.get("total", self._total)
        # A validation of the restored state is already in the log (see `_validate`).
        found = self.log.validation_at(self.progress.log_size, self.progress.position)
        if found is not None:
            summary, self.progress.log_size = found
            self.progress.judge(summary, self.progress.position)
        if self.progress.best:
            lost = run_folder.lost_model(self.config.out, self.model, self.stepper.scenario.companions())
            if lost is not None:
                self._forget_best(lost)

    def _forget_best(self, reason: str) -> None:
        """Let the next validation save the model, as the best one is lost."""
        progress = self.progress
        if self.world.first:
            warnings.warn(
                f"{reason}; the best model (step {progress.best_step}, rsum {progress.best['rsum']:.1f}) is lost, "
                f"and the best one from step {progress.position} on replaces it",
                stacklevel=2,
            )
        progress.best, progress.best_step, progress.validated_step = {}, 0, 0

    def run(self) -> TrainResult:
        """Train to the end, or until SIGINT or SIGTERM requests a stop, and save a state to resume from.

        Raises:
            ValueError: the loss is not finite, or a batch is invalid.
        """
        self._warn_without_negatives()
        _ = self._fingerprints  # Of frozen weights before a step changes them, as a momentum encoder does.
        self.progress.start()
        with self._own_data(), self.log.open(self.progress.log_size, self.progress.seconds_before):
            try:
                result = self._run()
            except KeyboardInterrupt:
                self.log.ending = "stopped"
                raise
            self.log.ending = "finished" if result.finished else "stopped"
            return result

    @contextlib.contextmanager
    def _own_data(self, *, after: bool = True) -> Iterator[None]:
        """Restore the original output of the training data `after` the block, or after an error in it."""
        try:
            yield
        except BaseException:
            after = True
            raise
        finally:
            if after:
                self.train_data.source.keep_bfloat16 = self._kept_before

    def _run(self) -> TrainResult:
        # Run a validation that the previous run did not finish.
        progress = self.progress
        if self._validation_due(progress.position):
            self._validate(progress.position)
        if progress.position < self._total:
            self.engine.load_state_dict(
                {"iteration": progress.position, "epoch_length": self.steps_per_epoch, "max_epochs": self.config.epochs}
            )
            # Without a terminal, print lines instead of a bar: one per validation and per logged step.
            hidden = None if self._talks else True
            with (
                on_stop_signals(self._request_stop, repeated=self.world.size > 1),
                tqdm(total=self._total, initial=progress.position, unit="step", disable=hidden) as self._bar,
                contextlib.closing(self._batches(progress.position)) as batches,
            ):
                self._started = (progress.position, time.monotonic())
                self.engine.run(batches)
            progress.position = self.engine.state.iteration
        return progress.result(self._total)

    def seconds_per_step(self, mining: str, steps: int = 5) -> float:
        """Measure steps with the negatives `mining` on the first batches.

        The steps change the weights, so use this only on a trainer that will not train.
        """
        times = []
        with contextlib.closing(self._batches(0)) as batches:
            for batch in itertools.islice(batches, steps + 2):
                start = time.perf_counter()
                self._step(batch, mining)
                times.append(time.perf_counter() - start)
        # The first two steps warm up memory and threads.
        return statistics.median(times[2:] or times)

    def _make_engine(self) -> Engine:
        engine = Engine(lambda _engine, batch: self._step(batch))
        # Ignite would log every exception to stderr, in addition to the one line that the user gets.
        engine.logger.setLevel(logging.CRITICAL)
        engine.add_event_handler(Events.EPOCH_STARTED, self._print_mining)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._after_step)
        return engine

    def _batches(self, position: int) -> Generator[Batch, None, None]:
        """Yield the batches from step `position` on. If one process cannot read its part or must stop, all processes
        learn of it.

        Closing the generator stops all reading.
        """
        batches = read_batches(
            self.config, self.train_data, self.phases, position, world=self.world, pin_memory=self.device.type == "cuda"
        )
        with contextlib.closing(batches):
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

    def _step(self, batch: Batch, mining: str | None = None) -> dict[str, float]:
        step = self.engine.state.iteration
        return self.stepper(batch, mining or self.mining, step, diagnose=self._log_due(step))

    @property
    def mining(self) -> str:
        """The negatives of the current epoch; epochs count from 1 once the run has started."""
        if self._own_loss:
            return self.stepper.mining
        return "all" if max(self.engine.state.epoch, 1) <= (self.config.warmup_epochs or 0) else self.stepper.mining

    @property
    def described_loss(self) -> str:
        """The loss and its negatives in all epochs, for the summary of a run."""
        if self._own_loss:
            return "your own"
        warmup, mining = self.config.warmup_epochs or 0, self.stepper.mining
        if warmup and mining != "all":
            first = "epoch 1" if warmup == 1 else f"epochs 1 to {warmup}"
            mining = f"all in {first}, then {mining}" if warmup < self.config.epochs else "all"
        return f"{self.config.loss}, negatives: {mining}"

    def _after_step(self, engine: Engine) -> None:
        step = engine.state.iteration
        output: dict[str, float] = engine.state.output  # type: ignore[assignment]
        if "loss" in output:
            self.progress.window.append(output["loss"])
        if self._log_due(step):
            self._log_window(output)
        for caution in self.stepper.cautions:
            self._log(
                kind="warning",
                step=step,
                epoch=engine.state.epoch,
                message=caution,
                seconds=round(self.progress.seconds, 3),
            )
        name = "loss" if "loss" in output else "discriminator_loss"
        self._bar.set_postfix(
            {name: f"{output[name]:.2f}", "rsum": f"{self.progress.best.get('rsum', 0.0):.1f}"}, refresh=False
        )
        self._bar.update()
        due = self._validation_due(step)
        # Save first, so that a failing validation loses nothing.
        save = due or self._stopping or step % self.steps_per_epoch == 0 or step % self.config.save_every == 0
        if save:
            self._save(step)
        if due:
            self._validate(step)
        # A stop requested after this decision waits for the next step.
        if save and self._stopping:
            engine.terminate()

    @property
    def _stopping(self) -> bool:
        """Whether this step is the last. With several processes, all must know before the step."""
        return self._stop_agreed or (self.world.size == 1 and self._stop_requested)

    def _log_due(self, step: int) -> bool:
        return step > 0 and (step % self.config.log_every == 0 or step == self._total)

    def _validation_due(self, step: int) -> bool:
        """Whether a validation is due after `step` and has not run yet."""
        unit = self.steps_per_epoch if self.config.validate_unit == "epoch" else 1
        due = step % (self.config.validate_every * unit) == 0 or step in (self._total, self._total_before)
        return due and step > 0 and step != self.progress.validated_step

    def _log(self, **line: Any) -> None:
        """Write a line; if the first process cannot, all end."""
        with self.world.together():
            self.log.write(**line)

    def _log_window(self, output: dict[str, float]) -> None:
        # Steps of the discriminators have no loss of the model: earlier losses wait for the model's next line.
        loss = {"loss": self.progress.mean_loss()} if "loss" in output else {}
        self._print_step(output)
        self._log(
            kind="train",
            step=self.engine.state.iteration,
            epoch=self.engine.state.epoch,
            mining=self.mining,
            **{**output, **loss},
            seconds=round(self.progress.seconds, 3),
        )

    def _print_mining(self, engine: Engine) -> None:
        """Print a line if the warm-up with all negatives ended before this epoch."""
        warmup, starts = self.config.warmup_epochs or 0, engine.state.iteration % self.steps_per_epoch == 0
        talks = self._talks and not self._own_loss
        if talks and starts and engine.state.epoch == warmup + 1 > 1 and self.mining != "all":
            self._bar.write(f"epoch {engine.state.epoch}/{self.config.epochs}: negatives now {self.mining}, before all")

    def _print_step(self, output: dict[str, float]) -> None:
        """Print a line if there is no progress bar, at most every `_LINE_SECONDS`."""
        now = time.monotonic()
        if not (self._talks and self._bar.disable) or now - self._printed < _LINE_SECONDS:
            return
        step = self.engine.state.iteration
        if "loss" in output:
            numbers = f"loss {output['loss']:.4g}, lr {output['lr']:.2g}"
        else:
            loss, lr = output["discriminator_loss"], output["discriminator_lr"]
            numbers = f"loss of the discriminators {loss:.4g}, their lr {lr:.2g}"
        rate = (step - self._started[0]) / max(now - self._started[1], 1e-9)
        left = datetime.timedelta(seconds=round((self._total - step) / rate))
        self._printed = now
        self._bar.write(
            f"epoch {self.engine.state.epoch}/{self.config.epochs}, step {step}/{self._total}: {numbers}, "
            f"{rate * self.config.batch_size:.0f} pairs/s, {left} left"
        )

    def _validate(self, step: int) -> None:
        epoch = -(-step // self.steps_per_epoch)
        # A resumed run does not repeat a logged validation, so training must not depend on what a validation draws.
        drawn = checkpoint.random_state(self.device)
        with self.stepper.autocast():
            summary = evaluate(
                self.model,
                self.validation_data,
                progress=self._talks,
                description=self.validation_data.split,
                world=self.world,
            )
        checkpoint.restore_random_state(drawn, self.device)
        better = self.progress.judge(summary, step)
        with self.world.together():
            if better and self.world.first:
                others = self.stepper.scenario.companions()
                run_folder.save_models(self.config.out, self.model, others, self.vocabulary)
        # Last, because a resumed run does not repeat a logged validation: the state is large, and writing it a
        # second time after the validation would double the cost of saving.
        position = {"split": self.validation_data.split, "step": step, "epoch": epoch}
        self._log(kind="validation", **position, seconds=round(self.progress.seconds, 3), **summary)
        if self._talks:
            self._bar.write(
                f"epoch {epoch}, step {step}: {self.validation_data.split} rsum {summary['rsum']:.1f}, R@1 "
                f"{summary['i2t_r1']:.1f} (image to text) {summary['t2i_r1']:.1f} (text to image)"
                + (f", MD {summary['mean_distance']:.2f}" if "mean_distance" in summary else "")
                + ", best" * better
            )

    def _save(self, step: int) -> None:
        random = checkpoint.random_states(self.world, self.device)
        with self.world.together():
            if self.world.first:
                self._write_state(step, random)

    def _write_state(self, step: int, random: dict[str, Any]) -> None:
        # The state contains the length of the log, so the log must be on disk first.
        self.log.lines.flush_to_disk()
        state = {
            "position": step,
            "total": self._total,
            "data": self._fingerprints,
            "made_with": self._made_with,
            "model": self.model.state_dict(),
            **self.stepper.state_dict(),
            **random,
            **self.progress.state(),
            "log_size": self.log.lines.size,
        }
        scenario = self.stepper.scenario
        scenario.save_files(self.config.out, self._data)
        checkpoint.save_state(self.config.out, state)
        scenario.forget_files(self.config.out)

    @property
    def _data(self) -> str:
        """Return an identifier of the training split for files that are saved beside the state."""
        return next(iter(self._fingerprints.values()))  # That of the captions comes first.

    @functools.cached_property
    def _fingerprints(self) -> dict[str, str]:
        return {
            **fingerprints(self.train_data),
            **fingerprints(self.validation_data),
            **model_fingerprint(self.config, self.model),
        }

    def _warn_without_negatives(self) -> None:
        one_image = self.config.exclude_same_image and len(self.train_data.caption_image.unique()) == 1
        if one_image or min(self.config.batch_size, len(self.train_data)) == 1:
            reason = "all captions are of one image" if one_image else "a step has one caption"
            warnings.warn(f"nothing can be learned: {reason}, and so no pair has a negative", stacklevel=3)

    def _request_stop(self) -> None:
        self._stop_requested = True
