"""A simulated GPU: CUDA code paths run on the CPU, so that they are tested on a machine without a GPU.

Inside: `Gpu`, `stand_in`, `WaitedError`. Tensors report a CUDA device; the kernels are those of the CPU. The operators
in `WAITING` raise an error in the sync debug mode "error" and during graph capture. Copies to the host and indexing
with masks also synchronise on a GPU, but are not detected. A graph replays its operators one by one on the captured
tensors; a Python number keeps its value from the capture.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from itm_fast.ops import library

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
# Operators that read numbers from the device and so synchronise.
WAITING = ("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "unique_consecutive", "_unique2")
NAME = "NVIDIA H200"


class WaitedError(RuntimeError):
    """The host synchronised with the device where it must not."""


class _LooksLikeCuda(TorchFunctionMode):
    """Make tensors report a GPU, and run calls for a GPU on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.device.__get__:
            return DEVICE
        if func == torch.Tensor.is_cuda.__get__:
            return True
        return func(*map(_moved, args), **{name: _moved(value) for name, value in (kwargs or {}).items()})


def _moved(argument: Any) -> Any:
    if isinstance(argument, torch.device):
        return CPU if argument.type == "cuda" else argument
    return "cpu" if isinstance(argument, str) and argument.split(":")[0] == "cuda" else argument


class _Watch(TorchDispatchMode):
    """Refuse operators that synchronise; append all operators to `calls` if given."""

    def __init__(self, calls: list[Any] | None = None) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in WAITING:
            raise WaitedError(f"{func.__name__} waits for the device")
        result = func(*args, **(kwargs or {}))
        if self.calls is not None:
            self.calls.append((func, args, kwargs or {}, result))
        return result


class _Graph:
    """The operators of a capture; `replay` runs them again and writes the results to the captured tensors."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, results in self.calls:
                again = func(*args, **kwargs)
                for kept, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)


class Gpu:
    """Replacements for functions of `torch.cuda`, which record the order of some calls."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.sync_debug_mode: Any = 0

    def replaced(self) -> dict[str, Any]:
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = time.perf_counter()

            def synchronize(self) -> None:
                gpu.order.append("event")

            def elapsed_time(self, end: Event) -> float:
                assert gpu.order[-1] == "event", "read before the device was waited for"
                return 1e3 * (end.at - self.at)

        class Stream:
            def wait_stream(self, other: Any) -> None:
                gpu.order.append("wait")

        @contextmanager
        def graph(captured: _Graph) -> Iterator[None]:
            gpu.order.append("capture")
            with _Watch(captured.calls):
                yield

        @contextmanager
        def stream(of: Stream) -> Iterator[None]:
            gpu.order.append("stream")
            yield

        default = Stream()
        properties = SimpleNamespace(name=NAME, major=9, minor=0, multi_processor_count=132, total_memory=143771 << 20)
        return {
            "CUDAGraph": _Graph,
            "Event": Event,
            "Stream": Stream,
            "_sleep": lambda cycles: gpu.order.append("sleep"),
            "current_device": lambda: 0,
            "current_stream": lambda: default,
            "get_device_capability": lambda index=0: (9, 0),
            "get_device_properties": lambda index=0: properties,
            "get_sync_debug_mode": lambda: gpu.sync_debug_mode,
            "graph": graph,
            "is_available": lambda: True,
            "max_memory_allocated": lambda: 1 << 20,
            "memory_allocated": lambda: 0,
            "reset_peak_memory_stats": lambda: None,
            "set_sync_debug_mode": lambda mode: setattr(gpu, "sync_debug_mode", mode),
            "stream": stream,
            "synchronize": lambda: gpu.order.append("synchronize"),
        }


class _DebugMode(_Watch):
    """Refuse synchronising operators while the sync debug mode is "error"."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.gpu.sync_debug_mode == "error":
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


@contextmanager
def stand_in() -> Iterator[Gpu]:
    """Simulate a GPU on the CPU, with every operator that has a CUDA kernel."""
    gpu = Gpu()
    generator = torch.Generator
    native = {name: devices | {"cuda"} if "cpu" in devices else devices for name, devices in library._native.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in gpu.replaced().items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "Generator", lambda device="cpu": generator(_moved(device)))
        patch.setattr(library, "_native", native)
        patch.setattr(library, "_cuda_problem", None)
        library._gpu_problem.cache_clear()
        with _LooksLikeCuda(), _DebugMode(gpu):
            yield gpu
    library._gpu_problem.cache_clear()
