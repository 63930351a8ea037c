"""Describe the GPU of this machine for reports, and measure memory and processor time of this process.

Inside: `described_device`, `gpu_description`, `kept_bytes`, `processor_time`.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

from itm_fast.benchmarking.measure import return_free_memory, status_bytes
from itm_fast.files.environment import processor_name


def kept_bytes() -> int:
    """Return the memory of this process in bytes, without free memory of the allocator if that is glibc's."""
    return_free_memory()
    return status_bytes("RssAnon")


def processor_time(call: Callable[[], Any]) -> float:
    """Return the processor seconds of one call, which other processes disturb less than its wall time."""
    start = time.process_time()
    call()
    return time.process_time() - start


def described_device(device: str) -> dict[str, Any]:
    """Describe the GPU; for a dry run the processor, under a name that no GPU has."""
    if device == "cuda":
        return gpu_description()
    return {"type": device, "name": f"dry run on {processor_name()}"}


def gpu_description() -> dict[str, Any]:
    """Describe the current CUDA device: name, compute capability, multiprocessors, memory, driver, CUDA of torch."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "type": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
    }


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.split("\n")[0].strip() or None if result.returncode == 0 else None
