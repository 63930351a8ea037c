"""Measure time and peak memory of several variants of a computation, on the CPU and on CUDA devices."""

from __future__ import annotations

import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

__all__ = [
    "CpuMeter",
    "CudaMeter",
    "Meter",
    "Timing",
    "interleave",
    "peak_memory",
    "reset_peak",
    "return_free_memory",
    "status_bytes",
]

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Timing:
    """Seconds of every run of one variant."""

    runs: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    def as_dict(self) -> dict[str, Any]:
        return {"median_s": self.median, "min_s": min(self.runs), "max_s": max(self.runs), "runs_s": self.runs}


def wall_time(call: Callable[[], Any]) -> float:
    """Seconds of one call on the CPU."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleave(
    variants: Mapping[str, Callable[[], Any]],
    repeats: Mapping[str, int],
    time_of: Callable[[Callable[[], Any]], float] = wall_time,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Timing]:
    """Time all variants in turn (A B C A B C) after one warm-up each, so that changes in machine speed affect all.

    Args:
        variants: name to call.
        repeats: name to number of measured runs, at least 1; a variant with fewer than the others is spread evenly.
        time_of: runs a call and returns its seconds.
        progress: called with a variant's name before each run.
    """
    rounds = max(repeats.values(), default=0)
    runs: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(-1, rounds):
        for name, call in variants.items():
            # Round r is measured where the line through (rounds, repeats) passes a whole number. A variant that runs
            # only once is too slow for a warm-up to matter.
            due = (round_ + 1) * repeats[name] // rounds > round_ * repeats[name] // rounds if round_ >= 0 else False
            warm_up = round_ < 0 and repeats[name] > 1
            if not (due or warm_up):
                continue
            progress(name)
            seconds = time_of(call)
            if due:
                runs[name].append(seconds)
    return {name: Timing(values) for name, values in runs.items()}


def peak_memory(make: Callable[..., Callable[[], Any]], *arguments: Any, threads: int) -> int | None:
    """Return the peak memory in bytes of one call in a fresh process, without its inputs.

    `make(*arguments)` runs in the new process and returns the call. Its inputs do not count. The call of
    `make(*arguments, small=True)` runs first, so that one-time initialization does not count either. Return None on
    systems other than Linux, which do not report peak memory.
    """
    if not _STATUS.exists():
        return None
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_peak, args=(sender, make, arguments, threads))
    # After timing a call, this process would hold as much as the new one needs.
    return_free_memory()
    process.start()
    sender.close()
    try:
        peak: int = receiver.recv()
    except EOFError:
        raise RuntimeError(f"the process that measured the memory of {arguments} died") from None
    finally:
        process.join()
    return peak


def _measure_peak(
    sender: Any, make: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...], threads: int
) -> None:
    torch.set_num_threads(threads)
    make(*arguments, small=True)()
    call = make(*arguments)
    reset_peak()
    before = status_bytes("VmRSS")
    call()
    sender.send(max(0, status_bytes("VmHWM") - before))
    sender.close()


def return_free_memory() -> None:
    """Give free memory of the allocator back to the system, if that is glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reset_peak() -> None:
    """Reset the peak memory of this process, `VmHWM`, to its current memory (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


class Meter(Protocol):
    """Measure time and memory on one type of device."""

    @property
    def device(self) -> str:
        """Device type, such as "cuda"."""

    def time_of(self, call: Callable[[], Any]) -> float:
        """Return the device time of one call in seconds."""

    def peak_bytes(self, make: Callable[..., Callable[[], Any]], *arguments: Any) -> int | None:
        """Return the peak memory of `make(*arguments)()` in bytes, above the memory in use before."""


@dataclass(frozen=True)
class CpuMeter:
    """Wall-clock time, and memory in a fresh process of `threads` threads."""

    threads: int
    device: str = "cpu"

    def time_of(self, call: Callable[[], Any]) -> float:
        return wall_time(call)

    def peak_bytes(self, make: Callable[..., Callable[[], Any]], *arguments: Any) -> int | None:
        return peak_memory(make, *arguments, threads=self.threads)


class CudaMeter:
    """Time between two CUDA events with cold caches, and memory as torch's allocator counts it.

    Before each run a buffer larger than any L2 cache is overwritten. That also keeps the device busy while Python
    launches what is measured, so that the time is the device's unless launching takes longer than that.

    Raises:
        RuntimeError: no CUDA device is available.
    """

    FLUSH_BYTES = 1 << 28

    def __init__(self, device: str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(f"no CUDA device: torch {torch.__version__} sees none")
        self.device = device
        self._flush = torch.empty(self.FLUSH_BYTES, dtype=torch.int8, device=device)

    def time_of(self, call: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def peak_bytes(self, make: Callable[..., Callable[[], Any]], *arguments: Any) -> int | None:
        call = make(*arguments)
        call()  # Exclude one-time initialization.
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return max(0, torch.cuda.max_memory_allocated() - before)


def status_bytes(key: str) -> int:
    """Return the entry `key` of this process's memory, such as `VmRSS`, in bytes (Linux)."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no line {key}")
