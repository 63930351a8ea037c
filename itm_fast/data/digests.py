"""Digests that tell whether data are those of before.

Inside: `sampled_sha256`, `sha256_of_parts`, `sha256_of_file`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from itm_fast.files import regular

# Features may be too large to be read whole: 16 MB of them are, in blocks spread evenly from the first byte to the
# last. Another extraction changes every block; smaller files are read whole.
_BLOCKS, _BLOCK_BYTES = 256, 1 << 16


def sampled_sha256(path: Path) -> str:
    """Of a file's size and of so many of its bytes, whatever its size; its name and times do not matter."""
    with regular.open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        last = max(size - _BLOCK_BYTES, 0)
        count = min(_BLOCKS, -(-size // _BLOCK_BYTES))
        for index in range(count):
            file.seek(last * index // max(count - 1, 1))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def sha256_of_parts(*parts: bytes) -> str:
    """Of byte strings, the length of each before it."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def sha256_of_file(path: Path, advance: Callable[[int], object]) -> str:
    """Of a whole file, read in blocks; `advance` is told how many bytes each has."""
    digest = hashlib.sha256()
    with regular.open_file(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()
