"""Attention over the regions of a picture, drawn as light: what a word looks at keeps its brightness and its colours.

Inside: `heat`, `peak`.
"""

from __future__ import annotations

import numpy as np

__all__ = ["heat", "peak"]

# A patch without attention: grey of two fifths of its brightness, a little blue.
_UNLIT = 0.4 * np.array([0.92, 0.98, 1.15])
_LUMA = np.array([0.299, 0.587, 0.114])


def heat(picture: np.ndarray, weights: np.ndarray, *, largest: float | None = None, power: float = 0.5) -> np.ndarray:
    """The picture uint8 (height, width, 3), each patch lit by its share of the largest weight, to the given power.

    `weights` (rows, columns), not negative, lie over the picture as a grid; its height and width are multiples of them.
    `largest` is that of all pictures that are to be compared; None: that of these weights. The square root shows what
    shares of a few percent look like, which would be all dark otherwise; the first power shows small differences.
    """
    rows, columns = weights.shape
    height, width = picture.shape[0] // rows, picture.shape[1] // columns
    if picture.shape != (rows * height, columns * width, 3):
        raise ValueError(f"picture: expected multiples of {rows} x {columns} pixels of 3 colours, got {picture.shape}")
    share = (weights / max(float(weights.max()) if largest is None else largest, 1e-12)) ** power
    light = np.kron(share, np.ones((height, width)))[:, :, None]
    unlit = (picture @ _LUMA)[:, :, None] * _UNLIT
    return np.rint(picture * light + unlit * (1 - light)).astype(np.uint8)


def peak(weights: np.ndarray) -> tuple[int, int, float]:
    """Row and column of the largest weight, counted from 1, and that weight."""
    row, column = np.unravel_index(int(weights.argmax()), weights.shape)
    return int(row) + 1, int(column) + 1, float(weights[row, column])
