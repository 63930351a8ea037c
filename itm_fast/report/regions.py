"""The regions of a picture on a page: patches of a grid, or boxes.

Inside: `GridRegions`, `BoxRegions`.
"""

from __future__ import annotations

import numpy as np

from itm_fast.report import boxes as drawing
from itm_fast.report.heat import heat, peak

__all__ = ["BoxRegions", "GridRegions"]


class GridRegions:
    """Regions that are the patches of a grid.

    Args:
        picture: pixels, uint8 (height, width, 3).
        grid: rows and columns.
        count: the number of regions; those before the patches are class tokens.
    """

    def __init__(self, picture: np.ndarray, grid: tuple[int, int], count: int) -> None:
        self.picture, self.shown, self.grid = picture, picture, grid
        self._before = count - grid[0] * grid[1]

    def described(self, number: int) -> tuple[str, np.ndarray | None]:
        """Return the name of a region, counted from 0, and its pixels."""
        if number < self._before:
            return "class token", None
        rows, columns = self.grid
        row, column = divmod(number - self._before, columns)
        height, width = self.picture.shape[0] // rows, self.picture.shape[1] // columns
        pixels = self.picture[row * height : (row + 1) * height, column * width : (column + 1) * width]
        return f"row {row + 1}, column {column + 1}", pixels

    def lit(self, weights: np.ndarray, **scale: float) -> tuple[np.ndarray, str, float]:
        """Light the picture by the weights of the regions; return it, the place of the brightest patch, its weight."""
        cells = weights[self._before :].reshape(self.grid)
        row, column, weight = peak(cells)
        where = f"row {row}, column {column} of {self.grid[0]} x {self.grid[1]}"
        return heat(self.picture, cells, **scale), where, weight


class BoxRegions:
    """Regions that are boxes, which may overlap.

    Args:
        picture: pixels, uint8 (height, width, 3).
        boxes: (n_regions, 4), left, top, right and bottom edge as shares of the sides.

    Attributes:
        picture, boxes: the arguments.
        shown: the picture with all boxes and their numbers.
    """

    def __init__(self, picture: np.ndarray, boxes: np.ndarray) -> None:
        self.picture, self.boxes = picture, boxes
        self.shown = drawing.numbered(picture, boxes)

    def described(self, number: int) -> tuple[str, np.ndarray | None]:
        """Return the name of a region, counted from 0, and its pixels."""
        left, top, right, bottom = drawing.pixels_of(self.boxes, self.picture.shape)[number].tolist()
        return f"region {number + 1}", self.picture[top:bottom, left:right]

    def lit(self, weights: np.ndarray, **scale: float) -> tuple[np.ndarray, str, float]:
        """Light the picture by the weights of the regions; return it, the name of the strongest one, its weight."""
        strongest = int(weights.argmax())
        lit = drawing.heat_of_boxes(self.picture, self.boxes, weights, **scale)
        return lit, f"region {strongest + 1}", float(weights[strongest])
