"""Plant faults into copies of the kernels, and run them under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from python_tests.helpers.processes import ROOT, run
from python_tests.helpers.shim import compiler

RUN_CASES = """
import sys
from pathlib import Path
import numpy as np
from python_tests.shim.shim_cases import outcomes
np.savez(sys.argv[2], **outcomes({name: Path(sys.argv[1], name + ".so") for name in sys.argv[3:]}))
"""


def planted(folder: Path, file: str, place: str, change: str) -> Path:
    """Copy the kernels, the shim and the drivers, with one place changed."""
    for part in ("csrc/include", "csrc/shim", "python_tests/native/shim"):
        shutil.copytree(ROOT / part, folder / part)
    text = (folder / file).read_text()
    assert text.count(place) == 1, f"{file} holds {text.count(place)} times: {place}"
    (folder / file).write_text(text.replace(place, change))
    return folder


def run_sanitized(folder: Path, *drivers: str) -> subprocess.CompletedProcess[str]:
    """Run the cases of the drivers in a process under AddressSanitizer."""
    command = [compiler(), "-print-file-name=libasan.so"]
    preload = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return run(
        [sys.executable, "-c", RUN_CASES, folder, folder / "outcomes.npz", *drivers],
        cwd=ROOT,
        LD_PRELOAD=preload,
        ASAN_OPTIONS="detect_leaks=0",  # The interpreter does not free all memory at exit.
    )
