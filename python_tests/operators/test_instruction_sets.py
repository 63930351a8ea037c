"""The native kernels pass their tests with every instruction set of this processor."""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import itm_fast
from python_tests.helpers.processes import ROOT, run


def run_native_tests(instruction_set):
    command = [sys.executable, "-m", "pytest", "-q", "-m", "native", "-p", "no:cacheprovider"]
    return run(command, cwd=ROOT, ITM_FAST_CPU_ISA=instruction_set)


def test_native_kernels_with_every_other_instruction_set():
    # This process tests the selected set. Each other set needs its own process; they run in parallel, one per
    # processor.
    sets = itm_fast.build_info()["instruction_sets"]
    others = [name for name in sets["available"] if name != sets["selected"]]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for name, result in zip(others, threads.map(run_native_tests, others), strict=True):
            assert result.returncode == 0, f"{name}:\n{result.stdout[-5000:]}"
            assert re.search(r"^\d+ passed", result.stdout, re.MULTILINE), result.stdout
