"""Load the native libraries and choose the implementation of each operator.

Every operator calls `use_native`; `build_info` reports the libraries and the choices. Environment variables, read at
import:

- `ITM_FAST_NATIVE=0`: do not load the native libraries; use the packed reference for all operators.
- `ITM_FAST_CPU_ISA=portable|avx2|avx512|avx512_bf16|amx`: force the instruction set of the CPU kernels.
"""

from __future__ import annotations

import functools
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo

from itm_fast.files.installation import find_library, host_module, library_folder, without_libraries
from itm_fast.version import __version__

OPERATORS = (
    "boosting_loss",
    "cross_attention_alignments",
    "cross_attention_scores",
    "domain_regularization",
    "hardest_negatives",
    "matching_loss",
    "maxsim_scores",
    "regulated_scores",
    "retrieval_ranks",
    "triplet_loss",
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Operators without float64 CUDA kernels: their scores or risks need float64 only for comparisons.
_WITHOUT_FLOAT64_ON_CUDA = frozenset(
    {
        "cross_attention_alignments",
        "cross_attention_scores",
        "domain_regularization",
        "matching_loss",
        "maxsim_scores",
        "regulated_scores",
    }
)

Fake = TypeVar("Fake", bound=Callable[..., Any])
Constant = TypeVar("Constant", bound=Callable[..., Any])
Excluded = TypeVar("Excluded", bound=Callable[..., Any])

# Device types and the dispatch keys under which kernels are registered for them.
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}


class FallbackWarning(UserWarning):
    """An operator runs on the packed reference because no native kernel is available. Issued once per cause."""


def constant_in_graphs(function: Constant) -> Constant:
    """Mark a function so that `torch.compile` runs it once and keeps its result as a constant.

    `torch.compiler.assume_constant_result` sets the same attribute, but imports `torch._dynamo`, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def outside_graphs(function: Excluded) -> Excluded:
    """Keep a function out of the graphs of `torch.compile`, as `torch.compiler.disable` does.

    `torch.compiler.disable` imports `torch._dynamo` when it decorates, which takes two seconds. With this decorator
    only the compiler, which has imported it, calls what torch excludes.
    """
    excluded: Any = _disable_dynamo(function)
    # What `torch.compiler.disable` sets, so that the compiler treats and reports both in the same way.
    excluded._torchdynamo_disable = True
    excluded._torchdynamo_disable_msg = None
    excluded._torchdynamo_disable_recursive = True
    excluded._torchdynamo_orig_callable = function
    excluded._torchdynamo_wrapper_id = id(excluded)

    @functools.wraps(function)
    def chosen(*arguments: Any, **options: Any) -> Any:
        return (excluded if torch.compiler.is_compiling() else function)(*arguments, **options)

    return cast(Excluded, chosen)


def _registered() -> list[str]:
    return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("itm_fast::")]


def _refuse_a_second_library(path: Path) -> None:
    """Raise ImportError if another file has registered the operators: a second registration aborts the process."""
    if _registered():
        ours = sorted(file for file in torch.ops.loaded_libraries if Path(file).name.startswith(path.name))
        if ours != [str(path)]:
            raise ImportError(
                f"the operators of itm_fast are already registered by {', '.join(ours) or 'an unknown library'}; "
                f"loading {path} as well would abort the process. Keep one installation of itm_fast"
            )


def _load_cpu_library() -> str | None:
    """Load `_C_cpu`; return None, or the reason why the native library is missing."""
    if os.environ.get("ITM_FAST_NATIVE", "1") == "0":
        return "ITM_FAST_NATIVE=0"
    path = library_folder() / "_C_cpu.so"
    if not path.exists():
        if platform.system() == "Windows":
            return "itm_fast has no native library for Windows"
        return without_libraries() or (
            "the native library was not built (install a C++ compiler, then install itm_fast again)"
        )
    _refuse_a_second_library(path)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path} could not be loaded ({str(error.__cause__ or error).splitlines()[0]})"
    return None


def _load_cuda_library() -> str | None:
    """Load `_C_cuda`, which uses the schemas of `_C_cpu`; return None, or the reason why CUDA has no kernels."""
    if torch.version.cuda is None:
        return None  # The reason is not needed if torch has no CUDA.
    path = library_folder() / "_C_cuda.so"
    if not path.exists():
        return "the CUDA library was not built (install nvcc, then install itm_fast again)"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path} could not be loaded ({str(error.__cause__ or error).splitlines()[0]})"
    return None


def _instruction_sets() -> tuple[str | None, list[str], str | None]:
    """Return the instruction set in use, the available ones, and the error if `ITM_FAST_CPU_ISA` is not available."""
    available = torch.ops.itm_fast.available_cpu_instruction_sets().split(", ")
    try:
        return torch.ops.itm_fast.cpu_instruction_set(), available, None
    except RuntimeError as error:
        return None, available, str(error).splitlines()[0]


def _native_devices() -> dict[str, frozenset[str]]:
    """Return for each operator, including backward operators, the device types with a kernel for it."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        name.removeprefix("itm_fast::"): frozenset(d for d, key in _DISPATCH_KEYS.items() if has_kernel(name, key))
        for name in _registered()
    }


_library_problem = _load_cpu_library()
_cuda_problem: str | None = None
_selected: str | None = None
_available: list[str] = []
_instruction_set_problem: str | None = None
if _library_problem is None:
    _cuda_problem = _load_cuda_library()
    _selected, _available, _instruction_set_problem = _instruction_sets()
# Empty without a library. Listing the operators of the dispatcher takes a millisecond, so do it once.
_native = _native_devices() if _library_problem is None else {}
_warned: set[str] = set()


def instruction_set() -> str | None:
    """Return the instruction set of the CPU kernels, or None if they are not used."""
    return _selected


def operators_of(device: str) -> frozenset[str]:
    """Return the native operators, including backward operators, with a kernel for a device type."""
    return frozenset(name for name, devices in _native.items() if device in devices)


def register_fake(operator: str) -> Callable[[Fake], Fake]:
    """Register a fake kernel with `torch.library.register_fake`; do nothing if the native library is not loaded."""
    return torch.library.register_fake(f"itm_fast::{operator}") if operator in _native else lambda fake: fake


def _build_information() -> dict[str, Any]:
    """Return the build information in `_host`, or an empty dictionary if it is missing."""
    host = host_module()
    return {} if host is None else dict(host.build_information())


@constant_in_graphs
@functools.cache
def _gpu_problem(index: int) -> str | None:
    """Return why the CUDA kernels cannot run on GPU `index` (it is older than all compiled architectures), or None."""
    compiled = [int("".join(filter(str.isdigit, name))) for name in _build_information().get("cuda_architectures", [])]
    major, minor = torch.cuda.get_device_capability(index)
    oldest = min(compiled, default=80)
    if 10 * major + minor >= oldest:
        return None
    return f"the CUDA kernels need compute capability {oldest // 10}.{oldest % 10}, cuda:{index} has {major}.{minor}"


def _fallback_cause(operator: str, device: str, dtype: torch.dtype, gpu: int | None = None) -> str | None:
    """Return why `operator` runs on the packed reference (on GPU `gpu`, if given), or None if a kernel is available.

    Raises:
        ValueError: this processor lacks the instruction set in `ITM_FAST_CPU_ISA`. Raised here rather than at import,
            so that a command can report it in one line.
    """
    if _instruction_set_problem is not None and device == "cpu":
        raise ValueError(_instruction_set_problem)
    if _library_problem is not None:
        return _library_problem
    if operator not in _native:
        return f"no native kernel of {operator} yet"
    if device == "cuda" and _cuda_problem is not None:
        return _cuda_problem
    if device not in _native[operator]:
        return f"no native kernel for device '{device}'"
    if dtype not in DTYPES:
        return f"no native kernel for {dtype}"
    if device == "cuda" and dtype == torch.float64 and operator in _WITHOUT_FLOAT64_ON_CUDA:
        return f"no native kernel for {dtype} on device 'cuda'"
    return None if gpu is None else _gpu_problem(gpu)


def use_native(operator: str, tensor: torch.Tensor, beyond: str | None = None) -> bool:
    """Return whether `operator` has a native kernel for the device and dtype of `tensor`.

    If not, issue a `FallbackWarning` once per cause; the caller must use the packed reference. `beyond` is a reason of
    the caller why the kernels do not support these operands, or None.
    """
    gpu = tensor.device.index if tensor.device.type == "cuda" else None
    cause = _fallback_cause(operator, tensor.device.type, tensor.dtype, gpu) or beyond
    if cause is None:
        return True
    _warn_once(cause)
    return False


@constant_in_graphs
def _warn_once(cause: str) -> None:
    """Warn if `cause` is new. Under `torch.compile`, this runs as plain Python during tracing."""
    if cause not in _warned:
        _warned.add(cause)
        # Point at the caller of the public function: _warn_once <- use_native <- ops <- functional <- caller.
        warnings.warn(f"itm_fast runs on the packed reference: {cause}", FallbackWarning, stacklevel=5)


def _path_of(operator: str, device: str) -> str:
    gpu = torch.cuda.current_device() if device == "cuda" and torch.cuda.is_available() else None
    cause = _fallback_cause(operator, device, torch.float32, gpu)
    if cause is not None:
        return f"packed reference: {cause}"
    return f"native {_selected}" if device == "cpu" else "native"


def build_info() -> dict[str, Any]:
    """Return the native libraries, their build settings, and the implementation of each operator.

    Raises:
        ValueError: this processor lacks the instruction set in `ITM_FAST_CPU_ISA`.

    Returns:
        A JSON-serializable dictionary:

        - "version": the version of itm_fast.
        - "libraries": path of the file of "_C_cpu", "_C_cuda" and "_host", or None.
        - "compiler", "build_type": compiler and build type of the native libraries; None without `_host`.
        - "torch": {"built": version that the libraries were built against or None, "running": version in use}.
        - "instruction_sets": {"compiled": list or None, "available": list for this processor, "selected": the one in
          use or None}.
        - "cuda_architectures": compiled architectures, such as ["90"].
        - "dispatch": {operator: {device: "native avx512" or "packed reference: <cause>"}}, for float32.
    """
    built = _build_information()
    files = {name: find_library(name) for name in ("_C_cpu", "_C_cuda", "_host")}
    return {
        "version": __version__,
        "libraries": {name: str(path) if path else None for name, path in files.items()},
        "compiler": built.get("compiler"),
        "build_type": built.get("build_type"),
        "torch": {"built": built.get("torch"), "running": torch.__version__},
        "instruction_sets": {
            "compiled": built.get("instruction_sets"),
            "available": _available,
            "selected": _selected,
        },
        "cuda_architectures": built.get("cuda_architectures", []),
        "dispatch": {name: {device: _path_of(name, device) for device in _DISPATCH_KEYS} for name in OPERATORS},
    }
