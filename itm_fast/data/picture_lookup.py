"""Find the pictures of images, to draw on them.

Inside: `picture_of`, `whole_picture_of`.
"""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import numpy as np
from PIL import Image

from itm_fast.data import store_format
from itm_fast.data.picture_shards import StoredPictures
from itm_fast.data.precomputed import PrecomputedDataset

__all__ = ["picture_of", "whole_picture_of"]

# Opening reads the lengths of all pictures.
_OPENED: WeakKeyDictionary[PrecomputedDataset, StoredPictures | None] = WeakKeyDictionary()


def picture_of(dataset: PrecomputedDataset, image: int, grid: int | None = None) -> tuple[np.ndarray | None, int]:
    """Return the picture of an image, and how many regions each of its sides has: `grid`, or those of the data.

    The picture (height, width, 3) uint8 is None if the data contain no pictures, if the regions have boxes, or if they
    are no square grid. Height and width are multiples of the grid.
    """
    if grid is None and dataset.box_source is not None:
        return None, 1
    square = grid is not None or math.isqrt(dataset.region_count(image)) ** 2 == dataset.region_count(image)
    grid = grid or math.isqrt(dataset.region_count(image))
    source = _pictures(dataset, image)
    if source is None or not square or grid > source.side:
        return None, 1
    picture = source.picture(image)
    side = -(-source.side // grid) * grid
    if side != source.side:
        picture = np.asarray(Image.fromarray(picture).resize((side, side)))
    return picture, grid


def whole_picture_of(dataset: PrecomputedDataset, image: int) -> np.ndarray | None:
    """Return the picture of an image as it is stored, (height, width, 3) uint8; None if the data contain no pictures.

    A picture that was stored with boxes is whole and has its proportions.
    """
    source = _pictures(dataset, image)
    return None if source is None else source.whole_picture(image)


def _pictures(dataset: PrecomputedDataset, image: int) -> StoredPictures | None:
    """Return the pictures of a split: the data themselves, or the pictures that its features were computed from."""
    if isinstance(dataset.source, StoredPictures):
        return dataset.source
    if dataset not in _OPENED:
        _OPENED[dataset] = _beside(dataset)
    found = _OPENED[dataset]
    return None if found is None or found.shape[0] <= image else found


def _beside(dataset: PrecomputedDataset) -> StoredPictures | None:
    folder = dataset.directory / store_format.PICTURES_FOLDER
    if not store_format.is_store(dataset.directory) or not store_format.is_store(folder):
        return None
    manifest = store_format.read_manifest(folder)
    record = manifest.split(dataset.split)
    if manifest.dtype not in store_format.PICTURES or record is None:
        return None
    return StoredPictures(folder, manifest.dtype, record)
