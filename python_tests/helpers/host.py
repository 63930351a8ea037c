"""What tests take the machine for: one with memory to spare, whatever else it does."""

from __future__ import annotations


def host_memory() -> tuple[int, int]:
    """Free bytes and all bytes."""
    return 48 * 2**30, 64 * 2**30
