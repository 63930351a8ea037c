"""Kill trainings and packs at random moments: the continued result equals the uninterrupted one, and no process stays.

Inside: `run_case`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

from python_tests.fuzz.files import SMALL
from python_tests.helpers.processes import ROOT
from python_tests.helpers.runs import differences, what_a_run_leaves

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
END_SECONDS = 30
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_case(seed: int, number: int, base: Path, folder: Path) -> str:
    """Run a case in `folder` and remove the folder; raise AssertionError with the description if the case fails."""
    random = Random(f"{seed} kills {number}")
    kind = random.choice([_training_at_calls, _command, _command])
    folder.mkdir(parents=True)
    try:
        return kind(random, base, folder)
    finally:
        shutil.rmtree(folder)


def _training_at_calls(random: Random, base: Path, folder: Path) -> str:
    """Kill a training four times: at function calls, during saves and validations, and after random times."""
    chosen = random.randrange(2**31)
    arguments = ["-m", "python_tests.training.kills", base / "data", folder, "4", str(chosen)]
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"kills {chosen}: {done.stderr[-1500:]}"
    whole = what_a_run_leaves(folder / "whole")
    for index, where in enumerate(json.loads(done.stdout)):
        found = differences(whole, what_a_run_leaves(folder / str(index)))
        assert not found, f"kills {chosen}, run {index}, killed {where}: {found}"
    return f"training killed at calls, {chosen}"


def _command(random: Random, base: Path, folder: Path) -> str:
    """End a command and its workers with a signal after a random time, and run it again."""
    name = random.choice(["train", "train", "pack"])
    data, out, whole = base / "data", folder / "out", folder / "whole"
    workers = random.choice(["0", "2"])
    if name == "train":
        first = ["train", "--data", data, "--epochs", "2", "--save-every", "2", "--workers", workers, *SMALL]
        again = ["train", "--resume", "--out", out, "--workers", workers]
    else:
        first = ["data", "pack", "--data", data]
        again = [*first, "--out", out]
    ends = _finish(_start([*first, "--out", whole]), None)
    assert ends.returncode == 0, ends.stderr
    seconds, how = random.uniform(0.5, 6.0), random.choice(SIGNALS)
    description = f"{name} with {workers} workers, {how.name} after {seconds:.2f} s"
    done = _finish(_start([*first, "--out", out]), how, seconds)
    if done.returncode != 0:
        started = name == "pack" or (out / "last" / "checkpoint.pt").exists()
        done = _finish(_start(again if started else [*first, "--out", out]), None)
    assert done.returncode == 0, f"{description}: the second run: {done.stderr[-1500:]}"
    assert _result(out, name) == _result(whole, name), f"{description}: another result"
    return description


def _result(out: Path, name: str) -> object:
    if name == "train":
        return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }


def _start(arguments: list[object]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "itm_fast", *map(str, arguments)],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _finish(
    process: subprocess.Popen[str], how: signal.Signals | None, seconds: float = 0.0
) -> subprocess.CompletedProcess[str]:
    """Wait for a command and all processes that it started; send it the signal `how` after `seconds` if given."""
    if how is not None:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(how)
    try:
        _, said = process.communicate(timeout=600)
        ends = time.monotonic() + END_SECONDS
        while _alive(process.pid):
            assert time.monotonic() < ends, f"processes are left {END_SECONDS} s after the command ended"
            time.sleep(0.1)
    finally:
        if _alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess([], process.returncode, "", said)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
