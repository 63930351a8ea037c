"""Every wrapper of machine.h alone: the CPU body gives the results of the manual, and the driver for GPUs compiles.

`python_tests/cuda/test_wrappers.py` compares both bodies on a GPU.
"""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
import torch

from python_tests.helpers.processes import ROOT
from python_tests.helpers.shim import KernelError, ProductKernels, compiled_driver
from python_tests.helpers.wrappers import CASES, WRAPPERS, Wrappers, compile_for_device

# Wrappers that index or order whole blocks and warps have no result to compare. The product, which is compared, uses
# them.
NOT_COMPARED = {
    "thread_index",
    "block_threads",
    "block_index",
    "warp",
    "warp_sync",
    "shared_address",
    "dynamic_shared_memory",
    # Losses with their gradient use these; GPU tests compare the losses with the reference.
    "grid_blocks",
    "grid_barrier",
    # Differs from the C library in the last digit; the tests of boosting_loss, which uses it, allow a tolerance.
    "exponential",
    # Likewise for domain_regularization.
    "logarithm_of_one_plus",
}


@pytest.fixture(scope="module")
def wrappers() -> Wrappers:
    return Wrappers(compiled_driver("wrappers"))


@pytest.mark.shim
@pytest.mark.parametrize("name", WRAPPERS)
def test_the_body_on_the_cpu_gives_what_the_manual_says(wrappers: Wrappers, name: str) -> None:
    for seed in range(5):
        given, before, expected = CASES[name](np.random.default_rng(seed))
        assert np.array_equal(wrappers.run(name, given, before, seed), expected)
        assert not np.array_equal(before, expected) or name == "votes"


def test_no_wrapper_is_left_out() -> None:
    declared = (ROOT / "csrc/include/itm_fast/cuda/device_machine.h").read_text()
    names = set(re.findall(r"^ITM_FAST_DEVICE [\w&* ]*?(\w+)\(", declared, re.M))
    names |= set(re.findall(r"^ITM_FAST_MMA\((\w+),", declared, re.M))
    called = set(re.findall(r"(\w+)(?:<\d>)?\(", (ROOT / "python_tests/native/shim/wrappers.h").read_text()))
    assert {"mma_bf16", "load_matrix", "copy_async", "atomic_max", "shuffle_xor"} <= names
    assert names - called == NOT_COMPARED


def test_the_driver_for_gpus_compiles_and_without_one_says_so(tmp_path) -> None:
    if shutil.which("nvcc") is None:
        return
    library = compile_for_device(tmp_path, "sm_90")
    if torch.cuda.is_available():
        return
    given, before, _ = CASES["shuffle"](np.random.default_rng(0))
    with pytest.raises(KernelError, match=r"^CUDA error: "):
        Wrappers(library).run("shuffle", given, before)
    zeros = np.zeros((8, 8), np.uint16)
    with pytest.raises(KernelError, match=r"^CUDA error: "):
        ProductKernels(library).product(zeros, zeros)
