"""Test files for benchmarks/gpu_check.sh: those for a GPU, the others in parts, and what the tests record."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree

from gpu_environment import ROOT

# All tests for a GPU. They import only torch, numpy and pytest, and pass without the conftest.py of python_tests.
WRAPPERS, LAUNCHES = "python_tests/cuda/test_wrappers.py", "python_tests/cuda/test_launches.py"
DEVICES = "python_tests/operators/test_devices.py"
DEVICE_FILES = (WRAPPERS, LAUNCHES, DEVICES)


def _files() -> list[str]:
    return sorted(str(file.relative_to(ROOT)) for file in (ROOT / "python_tests").rglob("test_*.py"))


def left_out(missing: list[str]) -> str:
    """Describe in one line which test files the stage `numbers` leaves out, and why."""
    why = f", and misses {', '.join(missing)} here" if missing else ""
    return f"{len(_files()) - len(DEVICE_FILES)} test files without GPU tests are left to the stage suite{why}"


def parts() -> list[list[str]]:
    """Group the files that need no GPU for runs on every second processor: some compile or start processes."""
    files = [file for file in _files() if not file.startswith("python_tests/cuda/")]
    return dealt_out(files, max(1, (os.cpu_count() or 1) // 2))


def dealt_out(files: list[str], most: int) -> list[list[str]]:
    """Group the files into at most `most` parallel runs: sequentially they would exceed the time limit of a call."""
    count = min(most, max(1, len(files) // 4))  # With few files, a run might select no test.
    return [files[first::count] for first in range(count)]


def launches(report: Path) -> dict[str, int]:
    """Return the most kernels that a call of each operator launched, from the report of test_launches.py."""
    found: dict[str, int] = {}
    if report.exists():
        for noted in ElementTree.parse(report).iter("property"):
            name, number = noted.attrib["name"], int(noted.attrib["value"])
            found[name] = max(number, found.get(name, 0))
        report.unlink()
    return found
