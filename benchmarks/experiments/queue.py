"""The queue of an experiment's runs. Several processes may work it off together; each takes what no other one holds.

Inside: `work_off`.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.experiments.files import Run
from itm_fast.files.lock import hold

__all__ = ["work_off"]

_WAIT = 1.0  # Seconds until another process is asked again for the runs that it holds.


def work_off(todo: Callable[[], Sequence[Run]], execute: Callable[[Run], bool], out: Path) -> bool:
    """Execute runs until none is left; False if a signal stopped one.

    Args:
        todo: the runs without a result, in order. Pending ones wait for their trials, those with an anchor for it.
        execute: trains a run and writes its result; False if a signal stopped it.
        out: folder for the lock files, one per run.
    """
    seconds: list[float] = []
    while runs := todo():
        names = {run.file_name for run in runs}
        ready = [run for run in runs if not run.pending and (run.anchor is None or run.anchor.file_name not in names)]
        taken = False
        for run in ready:
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(hold(out / f"{run.file_name}.lock", refusal=str, warning=str, temporary=True))
                except ValueError:
                    continue
                if run.file_name not in {one.file_name for one in todo()}:
                    continue
                taken = True
                left = f", {len(runs)} {'run' if len(runs) == 1 else 'runs'} left"
                if seconds:
                    left += f", about {len(runs) * statistics.mean(seconds) / 60:.0f} minutes in one process"
                print(f"{run.row}, seed {run.seed}: {out / run.file_name}{left}", flush=True)
                started = time.monotonic()
                if not execute(run):
                    return False
                seconds.append(time.monotonic() - started)
            break
        if not taken:
            time.sleep(_WAIT)
    return True
