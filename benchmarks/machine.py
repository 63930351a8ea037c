"""Describe the GPU of this machine, for reports."""

from __future__ import annotations

import subprocess
from typing import Any

from itm_fast.benchmarking.run import processor_name


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
