"""Small data sets in the published layout with known values.

Inside: `SPECIAL`, `VOCABULARY`, `features_of`, `write_split`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from itm_fast.data import Vocabulary

SPECIAL = ["<pad>", "<start>", "<end>", "<unk>"]
VOCABULARY = Vocabulary([*SPECIAL, "image", "caption", ".", *map(str, range(10))])


def features_of(n_rows: int, k: int = 3, f: int = 4, dtype: str = "float32") -> np.ndarray:
    """Make features (n_rows, k, f) with distinct values."""
    return np.arange(n_rows * k * f).reshape(n_rows, k, f).astype(dtype) / 8


def write_split(
    directory: Path,
    split: str,
    features: np.ndarray,
    n_captions: int,
    *,
    cap2im: Sequence[object] | None = None,
    ids: Sequence[object] | None = None,
) -> list[str]:
    """Write a split with captions "Caption 0 .", "Caption 1 caption .", ... of growing length; return the captions."""
    np.save(directory / f"{split}_ims.npy", features)
    captions = [f"Caption {index % 10} {'caption ' * (index % 4)}." for index in range(n_captions)]
    for suffix, lines in (("caps", captions), ("cap2im", cap2im), ("ids", ids)):
        if lines is not None:
            text = "".join(f"{line}\n" for line in lines)
            (directory / f"{split}_{suffix}.txt").write_text(text, encoding="utf-8")
    return captions
