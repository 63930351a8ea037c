"""Kill trainings at random moments and resume them: `python -m python_tests.training.kills DATA OUT KILLS SEED`.

This process loads torch once. Every training is a fork of it that ends at the end of the run or by SIGKILL, like one
ended by kill -9 or the kernel's out-of-memory killer. `OUT/whole` is trained without a kill; `OUT/0`, `OUT/1` and so on
are each killed and resumed until they finish. Prints as JSON how often and where each one was killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from tqdm import tqdm

from itm_fast.training import TrainConfig, Trainer, checkpoint
from python_tests.helpers.runs import OPTIONS, config, run

# Where a kill falls: at any call of a function, at one during a save, at one during a validation and its records, or
# after a time that passes outside.
PLACES: dict[str, CodeType | None] = {
    "anywhere": None, "save": checkpoint.save_state.__code__, "validation": Trainer._validate.__code__, "time": None,
}  # fmt: skip


def settings_of(data: Path, out: Path) -> TrainConfig:
    """Twelve steps in three epochs; saves and validations fall on and between the ends of epochs."""
    return config(
        data, out, epochs=3, warmup_epochs=1, log_every=3, save_every=3, validate_unit="step", validate_every=5,
        lr_decay_every=5, lr_decay_unit="step", text_augmentation=0.2, model_options={**OPTIONS, "word_dropout": 0.3},
    )  # fmt: skip


class Calls:
    """Count calls and returns, including C functions, and kill the process at one of them."""

    def __init__(self, place: str = "anywhere", fatal: int = 0) -> None:
        self.place, self.fatal = place, fatal
        self.counts = dict.fromkeys(PLACES, 0)
        self.inside = {place for place, code in PLACES.items() if code is None}

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        for place, code in PLACES.items():
            if code is frame.f_code and event in ("call", "return"):
                (self.inside.add if event == "call" else self.inside.discard)(place)
        for place in self.inside:
            self.counts[place] += 1
        if self.fatal and self.counts[self.place] == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def start(settings: TrainConfig, calls: Calls, report: Path | None = None) -> int:
    """Fork a process that trains, or resumes if there is a state."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        # All forks share tqdm's semaphore: a child killed while holding it would stop this process, too.
        tqdm.set_lock(threading.RLock())
        sys.setprofile(calls)
        result = run(settings, resume=(Path(settings.out) / checkpoint.STATE_FILE).exists())
        sys.setprofile(None)
        if report is not None:
            report.write_text(json.dumps(calls.counts))
        status = 0 if result.finished else 1
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def was_killed(child: int) -> bool:
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    if status != 0:
        raise RuntimeError(f"the training ended with status {status}")
    return False


def main(data: Path, out: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    # A fork of a process with threads may inherit a lock that no thread releases.
    tqdm.monitor_interval = 0
    started = time.monotonic()
    was_killed(start(settings_of(data, out / "whole"), Calls(), out / "calls.json"))
    seconds = time.monotonic() - started
    calls = json.loads((out / "calls.json").read_text())
    chosen = random.Random(seed)
    where: list[Counter[str]] = []
    done, finished = 0, True
    while done < kills or not finished:
        if finished:
            where.append(Counter())
        settings = settings_of(data, out / str(len(where) - 1))
        place = list(PLACES)[done % len(PLACES)]
        if done >= kills:
            child = start(settings, Calls())
        elif place == "time":
            child = start(settings, Calls())
            time.sleep(chosen.uniform(0, seconds / 2))
            os.kill(child, signal.SIGKILL)
        else:
            child = start(settings, Calls(place, chosen.randint(1, calls[place] // 2)))
        finished = not was_killed(child)
        if not finished:
            where[-1][place] += 1
            done += 1
    print(json.dumps(where))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
