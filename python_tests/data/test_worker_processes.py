"""Worker processes end with the training process, and their number is limited."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from itm_fast.data import BatchLoader, EpochSampler, PrecomputedDataset, pack
from itm_fast.data.store import StoreFeatures
from itm_fast.files.processors import check_count, set_threads
from python_tests.helpers.commands import SMALL, error
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.precomputed import VOCABULARY, features_of, write_split
from python_tests.helpers.processes import ROOT

# Workers print their number at their first instruction and wait until the file "go" is there.
SCRIPT = """
import multiprocessing, os, sys, time
from pathlib import Path
from itm_fast.data import BatchLoader, EpochSampler, PrecomputedDataset, loading
from python_tests.helpers.precomputed import VOCABULARY

follow = loading._follow_main_process

def delayed(number):
    os.write(1, f"{os.getpid()}\\n".encode())
    while not Path("go").exists():
        time.sleep(0.01)
    follow(number)
    Path(f"ready{number}").touch()

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    loading._follow_main_process = delayed
    data = PrecomputedDataset(".", "train", VOCABULARY)
    for batch in BatchLoader(data, EpochSampler(30, 2), workers=2):
        time.sleep(1)
"""


def ended(process: int) -> bool:
    """Whether a process has ended. Without a waiting parent it may remain as a zombie."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("killed", ["while they start", "while they read"])
def test_workers_end_with_a_training_process_that_is_killed(tmp_path: Path, method: str, killed: str) -> None:
    write_split(tmp_path, "train", features_of(6), 30)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    main = subprocess.Popen(
        [sys.executable, script, method],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    workers = [int(main.stdout.readline()) for _ in range(2)]
    try:
        if killed == "while they start":
            main.kill()
            main.wait()
            (tmp_path / "go").touch()
        else:
            (tmp_path / "go").touch()
            assert wait_for(lambda: len(list(tmp_path.glob("ready*"))) == 2)
            main.kill()
            main.wait()
        assert wait_for(lambda: all(map(ended, workers)))
    finally:
        main.kill()
        for worker in workers:
            if not ended(worker):
                os.kill(worker, signal.SIGKILL)


def test_counts_above_the_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    check_count("workers", 16)
    with pytest.raises(ValueError, match=r"^workers: expected 0 to 16 on 2 processors, got 17$"):
        check_count("workers", 17)
    with pytest.raises(ValueError, match=r"^threads: expected 0 to 16 on 2 processors, got -1$"):
        set_threads(-1)
    write_split(tmp_path, "train", features_of(6), 30)
    data = PrecomputedDataset(tmp_path, "train", VOCABULARY)
    with pytest.raises(ValueError, match=r"^workers: expected 0 to 16 on 2 processors, got 17$"):
        BatchLoader(data, EpochSampler(30, 2), workers=17)
    VOCABULARY.save(tmp_path / "vocab.json")
    record = pack(tmp_path, tmp_path / "store").split("train")
    with pytest.raises(ValueError, match=r"^threads: expected 0 to 16 on 2 processors, got 100000$"):
        StoreFeatures(tmp_path / "store", "bf16", record, None, threads=100_000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(10)))
    check_count("workers", 40)
    with pytest.raises(ValueError, match=r"^workers: expected 0 to 40 on 10 processors, got 41$"):
        check_count("workers", 41)


@pytest.mark.parametrize("option", ["--workers", "--threads"])
def test_training_refuses_too_many_workers_or_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    data = write_concepts(tmp_path / "data")
    message = f"{option.removeprefix('--')}: expected 0 to 16 on 2 processors, got 5000"
    command = ["train", "--data", data, "--out", tmp_path / "run", *SMALL, option, "5000"]
    assert error(capsys, *command) == (1, message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["evaluate", "bench"])
def test_commands_refuse_too_many_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    more = {"evaluate": ["--data", tmp_path, "--checkpoint", tmp_path], "bench": ["--quick"]}[command]
    message = "threads: expected 0 to 16 on 2 processors, got 17"
    assert error(capsys, command, *more, "--threads", "17") == (1, message)
