"""The tests of the native kernels pass with every instruction set that this processor has."""

import re
import sys

from helpers.processes import ROOT, run

import itm_fast


def test_native_kernels_with_every_other_instruction_set():
    # This process runs the same tests with the selected set; the others each need a process of their own.
    sets = itm_fast.build_info()["instruction_sets"]
    for name in sets["available"]:
        if name != sets["selected"]:
            command = [sys.executable, "-m", "pytest", "-q", "-m", "native", "-p", "no:cacheprovider"]
            result = run(command, cwd=ROOT, ITM_FAST_CPU_ISA=name)
            assert result.returncode == 0, f"{name}:\n{result.stdout[-5000:]}"
            assert re.search(r"^\d+ passed", result.stdout, re.MULTILINE), result.stdout
