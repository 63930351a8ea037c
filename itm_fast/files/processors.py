"""Processors and devices that this process may use, and limits on the threads and processes that it starts.

Inside: `available`, `check_count`, `device_of`, `set_threads`.
"""

from __future__ import annotations

import os

import torch

__all__ = ["available", "check_count", "device_of", "set_threads"]

_PER_PROCESSOR, _ALWAYS_ALLOWED = 4, 16


def available() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_count(name: str, count: int) -> None:
    """Check a number of threads or processes before any is started.

    Args:
        name: the setting, for the message.
        count: its value.

    Raises:
        ValueError: the count is negative, or larger than both 16 and four times the available processors.
    """
    processors = available()
    most = max(_PER_PROCESSOR * processors, _ALWAYS_ALLOWED)
    if not 0 <= count <= most:
        raise ValueError(f"{name}: expected 0 to {most} on {processors} processors, got {count}")


def device_of(name: str) -> torch.device:
    """Return the device `name`; ValueError if torch does not know it or cannot use it here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device: expected a device such as cpu or cuda, got {name!r}") from None
    try:
        float(torch.zeros(1, device=device))
    except Exception:
        # Each kind of device has its own exception for not being there; only using it tells for all of them.
        raise ValueError(f"device: {name!r} was asked for, but torch cannot use such a device here") from None
    return device


def set_threads(count: int) -> None:
    """Set the number of PyTorch's CPU threads; 0 keeps PyTorch's default.

    Raises:
        ValueError: as `check_count`.
    """
    check_count("threads", count)
    if count:
        torch.set_num_threads(count)
