"""Read the containers of device code that nvcc puts into a library, without a CUDA tool."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_MAGIC = struct.pack("<I", 0xBA55ED50)
_KINDS = {1: "ptx", 2: "sm"}


def _containers(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the start, the start of the entries, and the end of every container."""
    start = content.find(_MAGIC)
    while start >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", content, start)
        yield start, start + header, start + header + size
        start = content.find(_MAGIC, start + header + size)


def device_code(content: bytes) -> list[set[str]]:
    """Return the targets of the code in every container, such as {"sm_80", "sm_90", "ptx_90"}."""
    found = []
    for _, first, end in _containers(content):
        names = set()
        while first < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", content, first)
            (architecture,) = struct.unpack_from("<I", content, first + 28)
            names.add(f"{_KINDS[kind]}_{architecture}")
            first += header + size
        found.append(names)
    return found


def without_device_code(content: bytes) -> bytes:
    """Return the library with its device code replaced by zeros."""
    result = bytearray(content)
    for start, _, end in _containers(content):
        result[start:end] = bytes(end - start)
    return bytes(result)
