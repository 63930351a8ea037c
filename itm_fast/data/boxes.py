"""Boxes of regions: left, top, right and bottom edge, as shares of the width and height of the picture.

Inside: `are_boxes`, `open_boxes`, `read_boxes`, `RULE`.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from itm_fast.data import layout

__all__ = ["RULE", "are_boxes", "open_boxes", "read_boxes"]

RULE = "0 <= x0 <= x1 <= 1 and 0 <= y0 <= y1 <= 1"


def are_boxes(rows: np.ndarray) -> npt.NDArray[np.bool_]:
    """Return whether each of (..., 4) float32 rows is a box `(x0, y0, x1, y1)` within the picture, (...)."""
    x0, y0, x1, y1 = np.moveaxis(rows, -1, 0)
    # Comparisons with NaN are false.
    return (x0 >= 0) & (x0 <= x1) & (x1 <= 1) & (y0 >= 0) & (y0 <= y1) & (y1 <= 1)


def open_boxes(path: str | os.PathLike[str], n_rows: int, regions: int) -> np.memmap:
    """Map the boxes `(n_rows, regions, 4)` float16, float32 or float64 of a data folder. Only the header is read.

    Raises:
        ValueError: the file is damaged, or its shape is another one. The message names it.
    """
    boxes = layout.map_floats(path)
    if boxes.shape != (n_rows, regions, 4):
        raise ValueError(
            f"{path}: expected shape {(n_rows, regions, 4)}, a box for each region of the features, got {boxes.shape}"
        )
    return boxes


def read_boxes(
    path: str | os.PathLike[str], n_rows: int, regions: int, counts: np.ndarray | None, stride: int = 1
) -> npt.NDArray[np.float32]:
    """Read the boxes of a data folder.

    Args:
        path: `{split}_boxes.npy`.
        n_rows, regions: the rows of the features, and the regions of a row.
        counts: (n_images,) int64, how many regions of its row each image has; None: all.
        stride: how many rows each image has; the first counts.

    Returns:
        (N, 4), the boxes of all images end to end.

    Raises:
        ValueError: as `open_boxes`; or a box is not finite, not ordered or not within the picture.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        rows = np.asarray(open_boxes(path, n_rows, regions)[::stride], dtype=np.float32)
    kept = np.ones(rows.shape[:2], dtype=bool) if counts is None else np.arange(regions) < counts[:, None]
    wrong = np.argwhere(kept & ~are_boxes(rows))
    if len(wrong):
        image, region = wrong[0].tolist()
        found = ", ".join(f"{value:g}" for value in rows[image, region])
        raise ValueError(
            f"{path}: row {image * stride}: region {region}: expected (x0, y0, x1, y1) with {RULE}, got ({found}); "
            "divide pixels by the width and height of the picture"
        )
    return rows[kept]
