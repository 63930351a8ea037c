"""Draw attention over the regions of a picture: attended regions keep their colours, others become dark and grey.

Inside: `heat`, `peak`; `lit` and `shares_of`, their parts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["heat", "lit", "peak", "shares_of"]

# A patch without attention: bluish grey with 40 % of its brightness.
_UNLIT = 0.4 * np.array([0.92, 0.98, 1.15])
_LUMA = np.array([0.299, 0.587, 0.114])


def heat(picture: np.ndarray, weights: np.ndarray, *, largest: float | None = None, power: float = 0.5) -> np.ndarray:
    """Light each patch of a picture by its attention weight.

    The brightness of a patch is `(weight / largest) ** power`.

    Args:
        picture: pixels, uint8 `(height, width, 3)`; height and width are multiples of rows and columns.
        weights: weight of each patch, at least 0, `(rows, columns)`.
        largest: weight of full brightness, for pictures that are compared; None: the largest of `weights`.
        power: 0.5 keeps weights of a few percent visible, 1 shows small differences.

    Returns:
        Pixels, uint8 `(height, width, 3)`.

    Raises:
        ValueError: the size of the picture does not fit the grid.
    """
    rows, columns = weights.shape
    height, width = picture.shape[0] // rows, picture.shape[1] // columns
    if picture.shape != (rows * height, columns * width, 3):
        raise ValueError(f"picture: expected multiples of {rows} x {columns} pixels of 3 colours, got {picture.shape}")
    return lit(picture, np.kron(shares_of(weights, largest, power), np.ones((height, width))))


def shares_of(weights: np.ndarray, largest: float | None, power: float) -> npt.NDArray[np.float64]:
    """Return the brightness of weights, from 0 to 1."""
    shares: npt.NDArray[np.float64] = (
        weights / max(float(weights.max()) if largest is None else largest, 1e-12)
    ) ** power
    return shares


def lit(picture: np.ndarray, light: np.ndarray) -> npt.NDArray[np.uint8]:
    """Make pixels (height, width, 3) uint8 dark and grey, except by their light (height, width) from 0 to 1."""
    light = light[:, :, None]
    unlit = (picture @ _LUMA)[:, :, None] * _UNLIT
    pixels: npt.NDArray[np.uint8] = np.rint(picture * light + unlit * (1 - light)).astype(np.uint8)
    return pixels


def peak(weights: np.ndarray) -> tuple[int, int, float]:
    """Return row and column of the largest weight, counted from 1, and the weight."""
    row, column = np.unravel_index(int(weights.argmax()), weights.shape)
    return int(row) + 1, int(column) + 1, float(weights[row, column])
