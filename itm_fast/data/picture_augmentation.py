"""Augment pictures for training: a random crop, scaled to the size of the picture, and a random horizontal flip.

Inside: `PictureAugmentation`.
"""

from __future__ import annotations

import math

import attrs
import numpy as np
from PIL import Image

__all__ = ["PictureAugmentation"]

_TRIES = 10
_RATIO = 4 / 3
# Separates these random numbers from those of the data order, which have the same seed and epoch.
_STREAM = 1


@attrs.frozen
class PictureAugmentation:
    """Crop pictures at random, as torchvision's `RandomResizedCrop` does, and flip half of them.

    A crop has a random share of the picture's area and a random proportion of width and height from 3:4 to 4:3. Of ten
    draws, the first one that fits counts; if none fits, the whole picture is kept. The result depends only on seed,
    epoch and index. Source: Szegedy et al., "Going Deeper with Convolutions" (CVPR 2015), section 6.

    Attributes:
        seed, epoch: non-negative integers.
        area: the smallest share of the area, above 0 and at most 1.
        flip: flip half of the pictures horizontally.
    """

    seed: int
    epoch: int
    area: float = 0.5
    flip: bool = False

    def box(self, side: int, random: np.random.Generator) -> tuple[int, int, int, int]:
        """Draw a crop of a picture of `side` x `side` pixels: left, top, right, bottom."""
        for _ in range(_TRIES):
            area = side * side * random.uniform(self.area, 1)
            ratio = math.exp(random.uniform(-math.log(_RATIO), math.log(_RATIO)))
            width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < width <= side and 0 < height <= side:
                left, top = (int(random.integers(side - length + 1)) for length in (width, height))
                return left, top, left + width, top + height
        return 0, 0, side, side

    def __call__(self, pixels: np.ndarray, index: int) -> np.ndarray:
        """Return pixels (side, side, 3) uint8 of the item `index` of the epoch, changed."""
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_STREAM, self.seed, self.epoch, index])))
        side = len(pixels)
        box = self.box(side, random)
        changed = np.asarray(Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC, box=box))
        return changed[:, ::-1] if self.flip and random.random() < 0.5 else changed
