"""Divide splits into the shards of a store.

Inside: `check_widths`, `check_shards`, `sizes`, `ranges`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from itm_fast.data import store_format
from itm_fast.data.features import Features
from itm_fast.data.precomputed import PrecomputedDataset
from itm_fast.data.store_format import DTYPES, PICTURES

__all__ = ["check_shards", "check_widths", "ranges", "sizes"]

# Roughly how much smaller than its pixels a compressed picture is; it only decides how many a shard holds.
_COMPRESSION = 8


def check_widths(datasets: Sequence[PrecomputedDataset]) -> None:
    """Raise ValueError if the regions of two splits differ in width."""
    first = datasets[0]
    for data in datasets[1:]:
        if data.source.shape[2] != first.source.shape[2]:
            raise ValueError(
                f"{data.features_path}: regions of {data.source.shape[2]} channels, but {first.split} has "
                f"{first.source.shape[2]}"
            )


def check_shards(datasets: Sequence[PrecomputedDataset], dtype: str, shard_bytes: int) -> None:
    """Raise ValueError if the splits would need more shards than a store lists."""
    shards = sum(sum(1 for _ in ranges(sizes(data.source, dtype), shard_bytes)) for data in datasets)
    if shards > store_format.MOST_SHARDS:
        raise ValueError(
            f"shard_bytes: {shards:,} shards of {shard_bytes:,} bytes are more than the {store_format.MOST_SHARDS:,} "
            "that a store lists; expected larger shards, or a store for each part of the data"
        )


def sizes(source: Features, dtype: str) -> np.ndarray:
    """Return the bytes of each image in a store, (n_images,)."""
    regions = np.full(source.shape[0], source.shape[1]) if source.counts is None else source.counts
    if dtype in PICTURES:
        return regions * source.shape[2] // _COMPRESSION
    return regions * source.shape[2] * DTYPES[dtype].itemsize


def ranges(sizes: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of images with a total size of at most `most`; a larger image has a range to itself."""
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + most, side="right")), first + 1)
        yield first, last
        first = last
