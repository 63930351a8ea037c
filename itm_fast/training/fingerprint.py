"""Noticing that the data of a resumed run are not those it was started with.

Inside: `fingerprints`, `check_fingerprints`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from itm_fast.data import PrecomputedDataset

__all__ = ["check_fingerprints", "fingerprints"]

# Features may be too large to be read whole: 16 MB of them are, in blocks spread evenly from the first byte to the
# last. Another extraction changes every block; smaller files are read whole.
_BLOCKS, _BLOCK_BYTES = 256, 1 << 16


def fingerprints(data: PrecomputedDataset) -> dict[str, str]:
    """SHA-256 by file name: all captions with their images, features (size and blocks of the file), the vocabulary."""
    return {
        f"{data.split}_caps.txt": _sha256("\n".join(data.captions).encode(), data.caption_image.numpy().tobytes()),
        data.features_path.name: _sampled_sha256(data.features_path),
        "vocab.json": _sha256("\n".join(data.vocabulary.words).encode()),
    }


def check_fingerprints(before: dict[str, str], now: dict[str, str], source: Path) -> None:
    """ValueError naming the first file whose content is not the one that the state `source` was made with."""
    for name, digest in now.items():
        if before.get(name) != digest:
            raise ValueError(f"{name}: its content is not what the run to resume was started with ({source})")


def _sampled_sha256(path: Path) -> str:
    """Of a file's size and of so many of its bytes, whatever its size; its name and times do not matter."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        last = max(size - _BLOCK_BYTES, 0)
        count = min(_BLOCKS, -(-size // _BLOCK_BYTES))
        for index in range(count):
            file.seek(last * index // max(count - 1, 1))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
