"""Many steps: memory stays flat and numbers finite."""

from __future__ import annotations

import gc
import math
import sys
from pathlib import Path

import pytest
import torch
from ignite.engine import Engine

from benchmarks.machine import kept_bytes
from itm_fast.training import Trainer, checkpoint
from itm_fast.training.metrics_log import read_metrics
from python_tests.helpers.runs import config, run, weights

# Steps after which memory is read.
READ_AT = (*range(81, 101), *range(181, 201))


def resident_memory() -> int:
    """Return this process's own memory in bytes, or its peak if the system does not tell."""
    if Path("/proc/self/status").exists():
        return kept_bytes()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def living_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_a_run_of_two_hundred_steps_stays_finite_in_flat_memory(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run also saves, logs, plots, validates and keeps best models.

    A step that kept its loss with its graph would leak 150 kB and one tensor.
    """
    settings = config(
        data, tmp_path / "run", epochs=50, lr=5e-3, save_every=3, validate_unit="step", validate_every=5,
        validation_images=4, tensorboard=True, text_augmentation=0.2,
    )  # fmt: skip
    memory, tensors = [], []
    after_step, save = Trainer._after_step, checkpoint.save_state
    saves: list[int] = []

    def measured(self: Trainer, engine: Engine) -> None:
        after_step(self, engine)
        if engine.state.iteration in READ_AT:
            memory.append(resident_memory())
        if engine.state.iteration in (100, 200):
            tensors.append(living_tensors())

    monkeypatch.setattr(Trainer, "_after_step", measured)
    monkeypatch.setattr(
        checkpoint, "save_state", lambda run, state: saves.append(state["position"]) or save(run, state)
    )
    assert run(settings).steps == 200
    # Every third and fifth step and every end of an epoch, once each.
    assert saves == [step for step in range(1, 201) if 0 in (step % 3, step % 5, step % 4)]
    log = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = [line["loss"] for line in log if line["kind"] == "train"]
    assert (len(losses), len([line for line in log if line["kind"] == "validation"])) == (100, 40)
    assert all(math.isfinite(value) for line in log for value in line.values() if isinstance(value, float))
    assert sum(losses[-4:]) < 0.75 * sum(losses[:4])
    assert all(bool(values.isfinite().all()) for values in weights(tmp_path / "run").values())
    # Leaked memory raises the minimum; within a step, memory is higher for a while.
    assert min(memory[20:]) - min(memory[:20]) < 4 * 2**20
    assert tensors[1] - tensors[0] < 20
