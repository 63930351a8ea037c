"""The sanitizer stage of benchmarks/gpu_check.sh: controls, outcomes and limits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gpu_sanitize
import pytest
from gpu_stage import Stage

from python_tests.helpers.processes import run
from python_tests.helpers.wrappers import DRIVERS
from python_tests.tools.simulated_stage import written

REFUSED = "========= COMPUTE-SANITIZER\n========= Error: Device not supported\n========= ERROR SUMMARY: 1 error"
BARE_REFUSAL = "========= COMPUTE-SANITIZER\n========= Device not supported. Please refer to the documentation.\n"
NOTHING = "========= COMPUTE-SANITIZER\n9 operators ran: a\n========= ERROR SUMMARY: 0 errors\n"
RACES = "9 operators ran: a\n========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n"
NO_RACES = "9 operators ran: a\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


@pytest.mark.parametrize(
    ("status", "output", "outcome"),
    [
        (0, NOTHING, "passed"),
        (0, NO_RACES, "passed"),
        (7, RACES, "failed"),
        (7, NOTHING.replace("0 errors", "4 errors"), "failed"),
        (1, NOTHING, "failed"),  # The operators failed themselves.
        (0, NOTHING.replace("9 operators ran: a\n", ""), "failed"),
        (0, BARE_REFUSAL, "unavailable"),
        (0, "9 operators ran: a\n", "unavailable"),
    ],
)
def test_a_sanitizer_passes_only_by_its_own_summary(status: int, output: str, outcome: str) -> None:
    assert gpu_sanitize.judge(status, output)[0] == outcome


def test_a_sanitizer_that_misses_the_planted_fault_is_unavailable() -> None:
    planted = "========= Invalid __global__ write of size 4 bytes\n========= ERROR SUMMARY: 32 errors\n"
    assert gpu_sanitize.judge_control(7, planted) == ("passed", "the planted fault is found (32)")
    assert gpu_sanitize.judge_control(7, RACES)[0] == "passed"
    assert gpu_sanitize.judge_control(0, NOTHING) == ("unavailable", "it does not report a planted fault")
    refused = ("unavailable", "Device not supported. Please refer to the documentation.")
    assert gpu_sanitize.judge_control(1, BARE_REFUSAL) == refused
    assert gpu_sanitize.judge_control(1, "") == ("unavailable", "no output")


SANITIZER = """#!/bin/sh
case "$*" in
  *planted*) {control} ;;
  *) echo "2 operators ran: a, b"; echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""


@pytest.mark.parametrize(
    ("control", "outcome", "steps"),
    [
        ('echo "========= ERROR SUMMARY: 32 errors"; exit 7', "passed", ["passed"] * 5),
        ('echo "========= Device not supported"; exit 1', "unavailable", ["passed", *["unavailable"] * 4]),
        ('echo "========= ERROR SUMMARY: 0 errors"', "unavailable", ["passed", *["unavailable"] * 4]),
    ],
)
def test_the_operators_are_sanitized_where_the_control_passes(
    stage: Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    control: str,
    outcome: str,
    steps: list[str],
) -> None:
    """The compiler and the sanitizer are scripts that only print."""
    tools = {"compute-sanitizer": SANITIZER.format(control=control), "nvcc": '#!/bin/sh\necho "compiled $*"\n'}
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    gpu_sanitize.run(stage, lambda: "9.0")
    assert stage.finish()
    content = written(stage)
    assert content["outcome"] == outcome
    assert [step["outcome"] for step in content["steps"]] == steps
    assert "-arch=sm_90" in content["steps"][0]["detail"]
    names = ["compile", "memcheck control", "memcheck", "racecheck control", "racecheck"]
    assert [step["name"] for step in content["steps"]] == names
    if outcome == "passed":
        assert content["steps"][2]["detail"] == "no errors or hazards; 2 operators ran: a, b"
        # The short run uses one dtype per operator.
        assert content["steps"][4]["command"].endswith("gpu_operators.py cuda first")
        # Errors that the driver returns to torch are not out-of-bounds accesses.
        commands = [step["command"] for step in content["steps"]]
        assert ["--report-api-errors no" in command for command in commands] == [False, True, True, False, False]


def test_a_slow_sanitizer_leaves_time_to_the_next(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, list[float]] = {}

    def ran(name: str, command: list[str], judge: Any = None, *limit: float, **rest: Any) -> bool:
        limits[name] = list(limit)
        return True

    (tmp_path / "compute-sanitizer").write_text("#!/bin/sh\n")
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(stage, "run", ran)
    monkeypatch.setattr(stage, "left", lambda: 400.0)
    gpu_sanitize.run(stage, lambda: "9.0")
    assert (limits["memcheck"], limits["racecheck"]) == ([200.0], [400.0])


def test_the_planted_faults_compile(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        target = ["-std=c++17", "-arch=sm_90", "-Werror", "all-warnings", "-o", tmp_path / "planted"]
        result = run([nvcc, *target, DRIVERS / "planted.cu"], cwd=tmp_path)
        assert result.returncode == 0, result.stderr
