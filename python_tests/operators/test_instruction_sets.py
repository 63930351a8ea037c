"""The native kernels pass their tests with every instruction set of this processor."""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import itm_fast
from python_tests.helpers.processes import ROOT, run

FOLDER = ROOT / "python_tests/operators"
# They have the kernels of avx512, except for 16-bit products.
LOW_PRECISION_ALONE = ("avx512_bf16", "amx")


def run_native_tests(instruction_set):
    # Collecting the other files takes several seconds per instruction set.
    files = [
        file for file in sorted(FOLDER.glob("test_*.py")) if re.search("mark.native|triplet_cases", file.read_text())
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "native", "-p", "no:cacheprovider"]
    selected = itm_fast.build_info()["instruction_sets"]["selected"]
    if selected in LOW_PRECISION_ALONE and instruction_set in ("avx512", *LOW_PRECISION_ALONE):
        command += ["-k", "16 or half or precision or medium"]
    return run([*command, *files], cwd=ROOT, ITM_FAST_CPU_ISA=instruction_set)


def test_native_tests_lie_in_one_folder(request):
    marked = {item.path for item in request.session.items if item.get_closest_marker("native")}
    assert {path for path in marked if FOLDER not in path.parents} == set()


@pytest.mark.thorough
def test_native_kernels_with_every_other_instruction_set():
    # This process tests the selected set. Each other set needs its own process; they run in parallel, one per
    # processor.
    sets = itm_fast.build_info()["instruction_sets"]
    others = [name for name in sets["available"] if name != sets["selected"]]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for name, result in zip(others, threads.map(run_native_tests, others), strict=True):
            assert result.returncode == 0, f"{name}:\n{result.stdout[-5000:]}"
            assert re.search(r"^\d+ passed", result.stdout, re.MULTILINE), result.stdout
