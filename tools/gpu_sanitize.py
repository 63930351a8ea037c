"""compute-sanitizer over a short list of operators, for benchmarks/gpu_check.sh.

A tool must first find a planted fault on this device. A tool that does not (it is missing, refuses the device or
reports nothing) is "unavailable", never "passed".
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_environment import ROOT

# torch probes an older driver for functions that it lacks and continues; calls that fail for good raise an error.
TOOLS = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}
PLANTED = ROOT / "python_tests/native/shim/planted.cu"
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards? displayed)")


def found(output: str) -> int | None:
    """Return the number of errors or hazards in the tool's summary, or None without a summary."""
    summaries = SUMMARY.findall(output)
    return int(summaries[-1]) if summaries else None


def refusal(output: str) -> str:
    """Return the line that says why the tool did not work."""
    lines = [line.strip("= ").strip() for line in output.splitlines()]
    telling = [line for line in lines if re.search(r"not supported|error|unable|fail", line, re.I)]
    return (telling or [line for line in lines if line] or ["no output"])[-1 if not telling else 0][:300]


def judge_control(status: int, output: str) -> tuple[str, str]:
    """Judge the control: the tool works if it reports the planted fault."""
    count = found(output)
    if count:
        return "passed", f"the planted fault is found ({count})"
    return "unavailable", "it does not report a planted fault" if count == 0 else refusal(output)


def judge(status: int, output: str) -> tuple[str, str]:
    """Passed if the summary has no errors and the operators ran to their end."""
    count = found(output)
    if count is None:
        return "unavailable", refusal(output)
    if count or status != 0 or "operators ran" not in output:
        return "failed", f"{count} errors or hazards, exit status {status}"
    return "passed", f"no errors or hazards; {re.findall(r'.*operators ran.*', output)[-1]}"


def run(stage: Any, architecture: Callable[[], str]) -> None:
    """Run the steps of the stage."""
    sanitizer = shutil.which("compute-sanitizer")
    if stage.dry or sanitizer is None:
        why = "a dry run has no device" if stage.dry else "compute-sanitizer is not on the path"
        for tool in TOOLS:
            stage.note(tool, "unavailable", why)
        return
    program = stage.options.out / "planted"
    target = f"-arch=sm_{architecture().replace('.', '')}"
    if not stage.run("compile", ["nvcc", "-std=c++17", "-lineinfo", target, "-o", str(program), str(PLANTED)]):
        return
    for remaining, (tool, options) in zip(range(len(TOOLS), 0, -1), TOOLS.items(), strict=True):
        share = stage.left() / remaining  # A slow tool leaves time to the next one.
        command = [sanitizer, "--tool", tool, "--error-exitcode", "7", *options]
        if stage.run(f"{tool} control", [*command, str(program), tool], judge_control, limit=60):
            # Without torch's pool, an access past a tensor's end is also past an allocation's end.
            operators = [sys.executable, str(Path(__file__).with_name("gpu_operators.py"))]
            fewer = ["cuda", "first"] if stage.short else []
            stage.run(tool, [*command, *operators, *fewer], judge, share, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        else:
            stage.note(tool, "unavailable", "its control did not pass")
