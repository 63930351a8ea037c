"""Under torchrun: ADDR stopped in mid-run saves everything and resumes exactly; a killed process is reported.

One launch may train several times.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from itm_fast.training.checkpoint import load_state
from python_tests.distributed.test_distributed_runs import LOST
from python_tests.helpers.processes import HANGS
from python_tests.helpers.processes import run as run_command
from python_tests.helpers.runs import differences, what_a_run_leaves
from python_tests.helpers.worlds import run_jobs, train_job

# Three steps a pass, and passes for the discriminators and for the model in turns. The launcher's signal reaches worker
# processes, too.
OPTIONS = ("--scenario", "addr", "--batch-size", "59", "--model-option", "word_dropout=0.3", "--workers", "1")
STEPS_PER_EPOCH = 6
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "itm_fast"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.thorough
def test_a_signal_to_torchrun_saves_and_ends_all(quiet_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = train_job(2, quiet_data, out, *OPTIONS, "--epochs", "1000")["arguments"]
    launcher = subprocess.Popen(
        [*TORCHRUN, *arguments],
        cwd=tmp_path, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    log, end = out / "metrics.jsonl", time.monotonic() + HANGS
    while not (log.exists() and log.stat().st_size) and launcher.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    launcher.send_signal(signal.SIGTERM)
    text, error = launcher.communicate(timeout=HANGS)
    assert launcher.returncode == 1, error
    assert "processes: 2, which share each batch of 59\n" in text
    again = f"torchrun --nproc-per-node 2 -m itm_fast train --out {out} --resume"
    stopped = re.findall(r"^stopped after step (\d+); continue with: (.*)$", error, re.MULTILINE)
    assert [command for _, command in stopped] == [again]
    position = int(stopped[0][0])
    assert load_state(out)["position"] == position

    epochs = str(position // STEPS_PER_EPOCH + 2)
    resumed = run_command(
        [*TORCHRUN, "train", "--out", out, "--resume", "--epochs", epochs], cwd=tmp_path, **ENVIRONMENT
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "random numbers" not in resumed.stdout
    assert resumed.stdout.count("best model: ") == 1
    (outcomes,) = run_jobs([train_job(2, quiet_data, tmp_path / "whole", *OPTIONS, "--epochs", epochs)])
    assert [(status, error) for status, _, error in outcomes] == [(0, "")] * 2
    assert differences(what_a_run_leaves(tmp_path / "whole"), what_a_run_leaves(out)) == []
    assert load_state(out)["position"] == int(epochs) * STEPS_PER_EPOCH


@pytest.mark.thorough
def test_why_a_run_ends_whose_process_was_killed_is_said(quiet_data: Path, tmp_path: Path) -> None:
    """torchrun sends SIGTERM to the others at once; the reason is reported nevertheless."""
    out = tmp_path / "run"
    arguments = train_job(2, quiet_data, out, "--batch-size", "59", "--epochs", "1000")["arguments"]
    launcher = subprocess.Popen(
        [*TORCHRUN, *arguments],
        cwd=tmp_path, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    state, end = out / "last" / "checkpoint.pt", time.monotonic() + HANGS
    while not state.exists() and launcher.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    # The first process holds the lock.
    first = int((out / "last" / "lock").read_text().split()[0])
    children = [int(one) for one in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
    (other,) = {child for child in children if b"itm_fast" in Path(f"/proc/{child}/cmdline").read_bytes()} - {first}
    os.kill(other, signal.SIGKILL)
    _, error = launcher.communicate(timeout=HANGS)
    assert launcher.returncode == 1
    said = [line for line in error.splitlines() if line.startswith("itm-fast: ")]
    assert said == [LOST.format(1800).rstrip()], error
    assert load_state(out)["position"] > 0


# With a long switch interval, the main thread keeps Python's lock unless it waits. Gloo's threads then still hold the
# tensors of the last collective when the process group is freed.
HURRIED = """
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

from itm_fast.distributed import joined


def main():
    with joined("cpu"):
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()


sys.setswitchinterval(100.0)
main()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("attempt", range(3))
def test_processes_end_although_gloo_still_holds_tensors(tmp_path: Path, attempt: int) -> None:
    script = tmp_path / "hurried.py"
    script.write_text(HURRIED)
    done = run_command([*TORCHRUN[:-2], script], cwd=tmp_path, **ENVIRONMENT)
    assert done.returncode == 0, done.stderr


# The launcher's store keeps the keys of the first block. Each block gathers other numbers.
SEVERAL = """
from itm_fast.distributed import joined

for times in range(4):
    with joined("cpu") as world:
        found = world.objects((times, world.rank))
    assert found == [(times, 0), (times, 1)], found
"""


def test_processes_of_one_launch_meet_several_times(tmp_path: Path) -> None:
    script = tmp_path / "several.py"
    script.write_text(SEVERAL)
    done = run_command([*TORCHRUN[:-2], script], cwd=tmp_path, **ENVIRONMENT, ITM_FAST_TIMEOUT="900")
    assert done.returncode == 0, done.stderr
