"""The launchers of csrc/cuda on the CPU: their kernels run in the shim, in memory that torch allocates.

Inside: `compile_launchers`, `on_the_shim`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._inductor  # use_deterministic_algorithms imports it, which fails with the types of a stand-in.
from native_build import find_torch
from torch.utils._python_dispatch import TorchDispatchMode

from python_tests.helpers.shim import ROOT, compiled_shim, run_compiler

KEY = torch._C.DispatchKey.PrivateUse1


def compile_launchers(folder: Path) -> Path:
    """Compile all of csrc/cuda with the checks of csrc/ops; return the library."""
    found = find_torch()
    assert found is not None
    # The flags of CMake, without those of nvcc.
    target = re.search(r"ITM_FAST_TORCH_TARGET (0x\w+)", (ROOT / "CMakeLists.txt").read_text())[1]
    defined = ("__global__=", "__launch_bounds__(...)=", "__grid_constant__=", "ITM_FAST_WITHOUT_SCHEMAS")
    flags = [*(f"-D{name}" for name in defined), f"-DTORCH_TARGET_VERSION={target}", "-O0", "-fvisibility=hidden"]
    flags += [f"-I{ROOT / 'python_tests/native/shim/launchers'}", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/include'}"]
    launchers = sorted((ROOT / "csrc/cuda").glob("*.cu"))
    checks = [source for source in (ROOT / "csrc/ops").glob("*.cpp") if source.stem != "build_info"]
    flags += ["-isystem", f"{found[0]}/include"]
    # Most of the time of a source goes to headers of torch, so compile them once.
    header = folder / "headers.h"
    header.write_text("".join(f"#include <torch/csrc/stable/{name}.h>\n" for name in ("library", "ops", "tensor")))
    run_compiler(*flags, "-x", "c++-header", "-o", f"{header}.gch", header)
    objects = compiled_shim()
    for source in [*launchers, *checks]:
        objects.append(folder / f"{source.parent.name}_{source.stem}.o")
        run_compiler("-c", *flags, "-include", header, "-x", "c++", "-o", objects[-1], source)
    library = folder / "launchers.so"
    run_compiler("-shared", "-o", library, *objects, f"-L{found[0]}/lib", "-Wl,--no-as-needed", "-ltorch_cpu")
    return library


class _ToTheShim(TorchDispatchMode):
    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "itm_fast":
            return func(*args, **(kwargs or {}))
        self.calls[func.__name__.split(".")[0]] += 1
        return func._op_dk(KEY, *args, **(kwargs or {}))


@contextmanager
def on_the_shim() -> Iterator[Counter[str]]:
    """Run native operators with the launchers on the shim; yield the number of calls of each operator.

    New torch allocations are filled with NaN or the largest integer.
    """
    calls: Counter[str] = Counter()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # Also fills new allocations.
    try:
        with _ToTheShim(calls):
            yield calls
    finally:
        torch.use_deterministic_algorithms(before)
