"""Noticing that the data of a resumed run are not those it was started with.

Inside: `fingerprints`, `check_fingerprints`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from itm_fast.data import PrecomputedDataset

__all__ = ["check_fingerprints", "fingerprints"]

# Features are too large to be read whole. Another extraction changes every row, so that a few rows show it.
_SAMPLED_ROWS = 16


def fingerprints(data: PrecomputedDataset) -> dict[str, str]:
    """SHA-256 by file name: captions with their images, features (shape, dtype, sampled rows), and the vocabulary."""
    rows = np.unique(np.linspace(0, data.n_images - 1, _SAMPLED_ROWS).round().astype(np.int64))
    features = np.ascontiguousarray(data.features[rows])
    return {
        f"{data.split}_caps.txt": _sha256("\n".join(data.captions).encode(), data.caption_image.numpy().tobytes()),
        data.features_path.name: _sha256(f"{data.features.shape} {features.dtype}".encode(), features.tobytes()),
        "vocab.json": _sha256("\n".join(data.vocabulary.words).encode()),
    }


def check_fingerprints(before: dict[str, str], now: dict[str, str], source: Path) -> None:
    """ValueError naming the first file whose content is not the one that the state `source` was made with."""
    for name, digest in now.items():
        if before.get(name) != digest:
            raise ValueError(f"{name}: its content is not what the run to resume was started with ({source})")


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
