"""Kill changes of an index at random moments: `python -m python_tests.search.kills DATA OUT KILLS SEED`.

This process loads torch once. Every change is a fork of it that ends at the end of the change or by SIGKILL. After each
kill the index must be in the state before the change or in the state after it, pass `check`, and take the change again.
Prints as JSON how often each change was killed, and how often it had taken effect.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import shutil
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from itm_fast.search import Index, check, is_index
from python_tests.helpers.search import concepts, files_of, scan

QUERY = "red ball dog"
# Seconds after which a process that hangs prints where, and ends.
STUCK = 300


class Calls:
    """Count calls and returns, including C functions, and kill the process at one of them."""

    def __init__(self, fatal: int = 0) -> None:
        self.count, self.fatal = 0, fatal

    def __call__(self, _frame: FrameType, _event: str, _argument: Any) -> None:
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def state(path: Path) -> tuple[Any, ...] | None:
    """Return what a reader sees: the items and the exact scores of a query; None if there is no index."""
    if not is_index(path):
        return None
    index = Index.open(path, scan())
    (found,) = index.search(QUERY, index.size(), exact=True, of="images")
    return tuple((hit.item, hit.score) for hit in found.hits), tuple(index.items("captions"))


def run_child(change: Callable[[], object], calls: Calls, report: Path | None = None) -> bool:
    """Fork a process that makes a change; return whether it was killed."""
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(STUCK)
            sys.setprofile(calls)
            change()
            sys.setprofile(None)
            if report is not None:
                report.write_text(str(calls.count))
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    ended = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(ended) and ended:
        raise RuntimeError(f"the change ended with status {ended}")
    return os.WIFSIGNALED(ended)


def main(data: Path, out: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    # Without it, all forks share a semaphore: a child killed while holding it would stop this process, too. A class
    # derived from tqdm makes its own unless this one has a lock before.
    tqdm.set_lock(threading.RLock())
    faulthandler.register(signal.SIGALRM, chain=True)
    # A fork of a process with threads may inherit a lock that no thread releases.
    tqdm.monitor_interval = 0
    chosen = random.Random(seed)
    train, dev = concepts(data), concepts(data, "dev")
    extra = np.asarray(dev.features)[:2]
    index = out / "index"

    def opened() -> Index:
        return Index.open(index, scan())

    changes: dict[str, Callable[[], object]] = {
        "build": lambda: Index.build(scan(), train, index, pooling="mean"),
        "add": lambda: opened().add(dev),
        "small": lambda: opened().add(extra, ids=["x", "y"]),
        "delete": lambda: opened().delete([f"train{number}" for number in range(15)]),
        "compact": lambda: opened().compact(),
        "replace": lambda: Index.build(scan(), dev, index, pooling="mean", overwrite=True),
    }
    # Once in this process, so that forks import nothing that the first one would count.
    for change in changes.values():
        change()
    state(index)
    shutil.rmtree(index)
    # Each change once, to know its states and its number of calls.
    states, counts = [state(index)], {}
    for name, change in changes.items():
        if index.exists():
            shutil.copytree(index, out / f"before-{name}")
        run_child(change, Calls(), out / "calls")
        counts[name] = int((out / "calls").read_text())
        states.append(state(index))
    killed, effective = Counter[str](), Counter[str]()
    for number in range(kills):
        signal.alarm(2 * STUCK)
        place = number % len(changes)
        name = list(changes)[place]
        shutil.rmtree(index)
        if (out / f"before-{name}").exists():
            shutil.copytree(out / f"before-{name}", index)
        # Half of the kills fall near the end, where files are replaced and removed.
        first = 1 if number % 2 else counts[name] * 3 // 4
        fatal = chosen.randint(first, counts[name] - 1)
        if not run_child(changes[name], Calls(fatal)):
            continue
        killed[name] += 1
        found = state(index)
        if found not in (states[place], states[place + 1]):
            raise RuntimeError(f"{name}, killed at call {fatal} of {counts[name]}: half a change is visible")
        if found is not None and (problems := check(index)):
            raise RuntimeError(f"{name}, killed at call {fatal}: {problems}")
        if found == states[place + 1] != states[place]:
            effective[name] += 1
        else:
            changes[name]()
        if state(index) != states[place + 1]:
            raise RuntimeError(f"{name}, killed at call {fatal}, then made again: not the state after it")
        opened().compact()
        opened().set_candidates(7)
        if files_of(index):
            raise RuntimeError(f"{name}, killed at call {fatal}: {files_of(index)} is left")
    print(json.dumps({"killed": killed, "effective": effective}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
