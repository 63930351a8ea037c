"""Digests that identify data.

Inside: `sampled_sha256`, `sha256_of_parts`, `sha256_of_file`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from itm_fast.files import regular

# Features may be too large to read whole, so 16 MB are sampled in blocks from the first byte to the last. Another
# extraction changes every block. Smaller files are read whole.
_BLOCKS, _BLOCK_BYTES = 256, 1 << 16


def sampled_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's size and of sampled blocks. The file's name and times have no effect."""
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
    """Return the SHA-256 of byte strings, each preceded by its length."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def sha256_of_file(path: Path, advance: Callable[[int], object]) -> str:
    """Return the SHA-256 of a whole file. `advance` is called with the size of each block after reading it."""
    digest = hashlib.sha256()
    with regular.open_file(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()
