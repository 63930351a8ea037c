"""Faults planted into the CUDA kernels of `maxsim_scores`: each must fail the checks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from python_tests.helpers.fragments import random_fragments
from python_tests.helpers.shim import SANITIZERS, KernelError, compile_driver, compiled_driver
from python_tests.shim.faults import planted, run_sanitized
from python_tests.shim.maxsim_checks import KERNELS, check_maxsim, dtype_of
from python_tests.shim.shim_cases import outcomes
from python_tests.shim.shim_maxsim import MaxsimKernels

pytestmark = pytest.mark.shim

SCORES, BACKWARD, LAUNCH = (
    f"csrc/include/itm_fast/cuda/{name}.h" for name in ("maxsim", "maxsim_backward", "maxsim_launch")
)
SMALL = ("-DITM_FAST_FLOAT32_ALONE",)
ERROR = r"^maxsim: {}: error"


def check(library: Path) -> None:
    """Check short sets of several tiles, and sets that are longer than a tile on one side and on both."""
    kernels = MaxsimKernels(library)
    queries = random_fragments([3, 40, 2], 5, torch.float32)
    contexts = random_fragments([4, 5, 0, 20], 5, torch.float32, seed=1)
    check_maxsim(kernels, queries, contexts, direction="both", reduction="mean")
    check_maxsim(kernels, queries, contexts, pairs=torch.tensor([[0, 0], [2, 1], [0, 3], [0, 1]]), direction="both")


FAULTS = {
    "missing barrier between the maxima of rows and of columns": (
        (SCORES, "      barrier();  // The maxima of columns are written over products.\n", ""),
        r"shared array 'scores': race at index \d+",
    ),
    "missing barrier before the next product": (
        (SCORES, "        barrier();  // The next product takes the place of the maxima.\n", ""),
        r"shared array '\w+': (race at|read of|write of) index \d+",
    ),
    "the best partner of earlier products is lost": (
        (SCORES, "if (!others.is_first) best = carried;", ""),
        ERROR.format("scores"),
    ),
    "partners are counted from the begin of a product": (
        (SCORES, "static_cast<int32_t>(others.first) + k - first", "k - first"),
        ERROR.format("(queries|contexts)"),
    ),
    "the sums of earlier products are lost": (
        (SCORES, "(is_written_ ? score : 0.0f)", "0.0f"),
        ERROR.format("scores"),
    ),
    "rows that chose another row are added": (
        (BACKWARD, "best[at] == own_place", "best[at] >= own_place"),
        ERROR.format("(queries|contexts)"),
    ),
    "the mean divides by the rows of the other side": (
        (BACKWARD, "static_cast<float>(length)", "static_cast<float>(own_length)"),
        ERROR.format("(queries|contexts)"),
    ),
    "listed pairs of a set share their best partners": (
        (SCORES, "return {number * slot, slot};", "return {number / 2 * slot, slot};"),
        ERROR.format("(queries|contexts)"),
    ),
    "pairs of all sets are added to each": (
        (BACKWARD, "(kOfQueries ? pair.query : pair.context) == set_", "true"),
        ERROR.format("(queries|contexts)"),
    ),
    "a listed pair has no room for the last row of the longest set": (
        (LAUNCH, "slot = is_by_pairs ? room : 0;", "slot = is_by_pairs ? room - 1 : 0;"),
        ERROR.format("(queries|contexts)"),
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_the_checks(name: str, tmp_path: Path) -> None:
    fault, message = FAULTS[name]
    root = planted(tmp_path / "faulty", *fault)
    library = compile_driver("maxsim", tmp_path, *SMALL, root=root)
    with pytest.raises((AssertionError, KernelError)) as caught:
        check(library)
    assert re.search(message, str(caught.value)), str(caught.value)


def test_tensor_cores_that_truncate_keep_the_accuracy(tmp_path: Path) -> None:
    library = compile_driver("maxsim", tmp_path, "-DITM_FAST_SHIM_TRUNCATES")
    for kernel in KERNELS:
        sides = [random_fragments([4, 20], 300, dtype_of(kernel), seed=seed) for seed in range(2)]
        check_maxsim(MaxsimKernels(library), *sides, kernel, reduction="mean", direction="both")


@pytest.mark.thorough
def test_the_kernels_as_they_are_pass_the_checks_and_the_sanitizers(tmp_path: Path) -> None:
    """With the same bits."""
    library = compiled_driver("maxsim", *SMALL)
    check(library)
    expected = outcomes({"maxsim": library})
    compile_driver("maxsim", tmp_path, *SMALL, *SANITIZERS)
    result = run_sanitized(tmp_path, "maxsim")
    assert result.returncode == 0, result.stderr[-3000:]
    with np.load(tmp_path / "outcomes.npz") as actual:
        assert set(actual) == set(expected)
        for name, right in expected.items():
            assert actual[name].tobytes() == right.tobytes(), name
