"""The whole test suite on a machine with a GPU, for benchmarks/gpu_check.sh: in parts, and with the tests' records."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree

from gpu_environment import ROOT


def parts() -> list[list[str]]:
    """Group the files that need no GPU for runs on every second processor: some compile or start processes."""
    found = sorted((ROOT / "python_tests").rglob("test_*.py"))
    files = [str(file.relative_to(ROOT)) for file in found if file.parent.name != "cuda"]
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
