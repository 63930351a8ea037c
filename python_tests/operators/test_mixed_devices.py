"""Kernels refuse tensors of two devices, on the CPU and on CUDA; they would read wrong addresses.

The public functions check devices in Python; these tests call `torch.ops.itm_fast` directly. No GPU is needed: the
launchers check devices before any call to the GPU.
"""

from __future__ import annotations

import json

import check_cuda_library
import torch

from python_tests.helpers.processes import BUILDS_CUDA, ROOT, run_python
from python_tests.operators.mixed_devices import CALLS, on_one_device, refusals

NAMES = {operator for operator, _, _ in CALLS}
CPU_ONLY = {"cross_attention_grams", "cross_attention_scores_prepared"}
# The CUDA library works with any torch: a stub replaces libtorch_cuda if torch has no CUDA.
ON_CUDA = """
import ctypes, json, sys
sys.path.insert(0, ".")
import torch
import itm_fast
for stub in {stubs!r}:
    ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library({library!r})
from python_tests.operators.mixed_devices import on_one_device, refusals
operators, wrong = refusals("CUDA")
print(json.dumps([sorted(operators), wrong, on_one_device("CUDA")]))
"""


def test_cpu_kernels_refuse_tensors_of_another_device() -> None:
    operators, wrong = refusals("CPU")
    assert wrong == []
    assert operators == NAMES
    assert set(on_one_device("CPU").values()) == {None}


def test_cuda_kernels_refuse_tensors_of_another_device() -> None:
    library = ROOT / "itm_fast" / "_C_cuda.so"
    assert library.exists() == BUILDS_CUDA
    if not library.exists():
        return
    stubs = sorted(str(stub) for stub in (ROOT / "build").glob("native-*/torch_cuda_stub/libtorch_cuda.so"))[:1]
    code = ON_CUDA.format(stubs=[] if torch.version.cuda else stubs, library=str(library))
    operators, wrong, of_cpu = json.loads(run_python(code))
    assert wrong == []
    assert set(operators) == NAMES - CPU_ONLY
    assert set(of_cpu.values()) == {"itm_fast: expected CUDA tensors, got one on cpu"}


def test_every_cuda_kernel_is_called() -> None:
    assert check_cuda_library.implemented(ROOT / "csrc" / "cuda") <= NAMES
