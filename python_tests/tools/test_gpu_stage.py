"""Steps of a stage of benchmarks/gpu_check.sh: logs, limits and outcomes."""

from __future__ import annotations

import os
import select
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from gpu_stage import Stage, by_tests

from python_tests.tools.simulated_stage import python, written


def test_every_step_is_written_down_at_once(stage: Stage) -> None:
    assert stage.run("good", python("print('first'); print('done')"))
    assert written(stage)["outcome"] == "incomplete"
    with tarfile.open(stage.options.out / "gpu_check_nvidia_h200.tar.gz") as packed:
        name = stage.file.stem
        assert {Path(file).name for file in packed.getnames()} == {f"{name}.json", f"{name}_good.log"}
    assert not stage.run("bad", python("raise SystemExit('broken')"))
    steps = written(stage)["steps"]
    assert [(step["name"], step["outcome"], step["detail"]) for step in steps] == [
        ("good", "passed", "done"),
        ("bad", "failed", "broken"),
    ]
    assert steps[1]["command"].endswith("-c raise SystemExit('broken')")
    assert not stage.finish()
    assert written(stage)["outcome"] == "failed"
    assert not list(stage.options.out.glob("*.partial"))


ENDLESS = """
import subprocess, sys
print("begun", flush=True)
started = "import sys, time; pipe = open(sys.argv[1], 'wb', 0); pipe.write(b'.'); time.sleep(600)"
subprocess.run([sys.executable, "-c", started, *sys.argv[1:]])
"""


def test_a_step_is_stopped_at_its_limit_with_what_it_started(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit passes once a child process of the step has opened a pipe. The pipe closes when the child ends."""
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    limits: list[float] = []

    def from_pipe() -> bytes:
        assert select.select([pipe], [], [], 300)[0], "neither written to nor closed"
        return os.read(pipe, 1)

    class Popen(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                limits.append(timeout)
                assert from_pipe() == b"."
            return super().wait(timeout and 0.01)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    assert not stage.run("endless", [*python(ENDLESS), str(tmp_path / "pipe")], limit=5)
    assert from_pipe() == b""
    os.close(pipe)
    assert limits == [5]
    stage.deadline = time.monotonic() + 1
    assert not stage.run("late", python("print('never')"))
    assert [(step["outcome"], step["detail"]) for step in written(stage)["steps"]] == [
        ("failed", "stopped after 5 s: begun"),
        ("not run", "no time was left"),
    ]


# Ends when another step that runs this code has begun.
MEETING = """
import pathlib, sys, time
own, other, said = sys.argv[1:]
pathlib.Path(own).touch()
end = time.monotonic() + 300
while not pathlib.Path(other).exists() and time.monotonic() < end:
    time.sleep(0.01)
print(said if pathlib.Path(other).exists() else "alone")
"""


def test_steps_side_by_side_are_written_down_each(stage: Stage, tmp_path: Path) -> None:
    one, two = str(tmp_path / "begun 1"), str(tmp_path / "begun 2")
    meeting = python(MEETING)
    stage.run_together(
        {"one": [*meeting, one, two, "1 passed"], "two": [*meeting, two, one, "2 passed"],
         "bad": python("print('1 failed')")},
        by_tests,
    )  # fmt: skip
    steps = written(stage)["steps"]
    assert [(step["name"], step["outcome"], step["detail"]) for step in steps] == [
        ("one", "passed", "1 passed"),
        ("two", "passed", "2 passed"),
        ("bad", "failed", "1 failed"),
    ]
    stage.deadline = time.monotonic() + 1
    stage.run_together({"late": python("print('never')")}, by_tests)
    assert written(stage)["steps"][-1]["detail"] == "no time was left"


def test_what_is_unavailable_has_not_passed(stage: Stage) -> None:
    stage.note("compile", "passed", "")
    stage.note("memcheck", "unavailable", "Device not supported")
    assert stage.finish()
    assert written(stage)["outcome"] == "unavailable"


@pytest.mark.parametrize(
    ("status", "summary", "outcome"),
    [
        (0, "13 passed, 2 deselected in 3.1s", "passed"),
        (0, "13 passed, 1 skipped in 3.1s", "failed"),
        (5, "no tests ran in 0.1s", "failed"),
        (0, "2 deselected in 0.1s", "failed"),
        (1, "1 failed, 12 passed in 3.1s", "failed"),
    ],
)
def test_a_test_run_that_ran_nothing_or_skipped_has_not_passed(status: int, summary: str, outcome: str) -> None:
    assert by_tests(status, f".....\n{summary}\n") == (outcome, summary)
