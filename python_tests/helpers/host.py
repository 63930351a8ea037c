"""Fixed host memory for the tests: plenty is free, whatever else the machine runs."""

from __future__ import annotations


def host_memory() -> tuple[int, int]:
    """Return the free and the total memory in bytes."""
    return 48 * 2**30, 64 * 2**30
