"""Sources of an import: picture files that are encoded, or resized and compressed, when they are read.

Inside: `Encoder`, `EncodedPictures`, `ResizedPictures`, `Decoded`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from itm_fast.data.digests import sha256_of_parts
from itm_fast.data.features import Features
from itm_fast.data.picture_files import decoded
from itm_fast.data.picture_folder import SplitPictures
from itm_fast.data.picture_shards import as_patches, as_square, decode_picture, encode_picture
from itm_fast.data.preprocessing import KeptProportions, Preprocessing
from itm_fast.files import regular

__all__ = ["Decoded", "EncodedPictures", "Encoder", "ResizedPictures"]

# Pictures per call of the encoder.
_BATCH = 32


class Encoder(Protocol):
    """What turns pictures into regions."""

    @property
    def preprocessing(self) -> Preprocessing: ...

    @property
    def regions(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def digest(self) -> str: ...

    @property
    def kind(self) -> str: ...

    def __call__(self, pixels: Tensor) -> Tensor: ...


class Decoded:
    """Results for pictures in order, made by processes that work ahead.

    Args:
        pictures: the pictures.
        make: returns the result for a file; worker processes call it.
        workers: processes; 0: this process.
    """

    def __init__(self, pictures: SplitPictures, make: Callable[[Path], Any], workers: int) -> None:
        digests = {path: look.digest for path, look in zip(pictures.paths, pictures.looks, strict=True)}
        self._paths, self._make, self._workers = pictures.paths, functools.partial(_unchanged, make, digests), workers
        self._items: Iterator[Any] = iter(())
        self._next = -1

    def take(self, first: int, last: int) -> Iterator[Any]:
        """Yield the results for pictures `first` to `last - 1`; raise the ValueError of one that cannot be decoded."""
        if first != self._next:
            self._items = decoded(self._paths[first:], self._make, self._workers)
        for self._next in range(first + 1, last + 1):
            item = next(self._items)
            if isinstance(item, ValueError):
                raise item
            yield item
        if last == len(self._paths):
            self._items = iter(())  # This ends the processes.


def _unchanged(make: Callable[[Path], Any], digests: Mapping[Path, bytes], path: Path) -> Any:
    """Return `make(path)`; raise ValueError if the file is not the one that was looked at first."""
    with contextlib.suppress(OSError):
        if hashlib.sha256(regular.read_bytes(path)).digest() != digests[path]:
            raise ValueError(
                f"{path}: changed while it was imported; restore it, or remove the unfinished store and import again"
            )
    return make(path)


class EncodedPictures(Features):
    """Features that an encoder computes from picture files when they are read.

    Args:
        pictures: the pictures of a split.
        encoder: turns pixels (n, side, side, 3) uint8 into regions (n, k, f) float32.
        workers: processes that decode.
    """

    in_process = False
    counts = None
    dtype = torch.float32

    def __init__(self, pictures: SplitPictures, encoder: Encoder, workers: int) -> None:
        self.shape = (len(pictures.paths), encoder.regions, encoder.width)
        self.digest, self.encoder = encoder.digest, encoder.kind
        self._paths, self._encoder = pictures.paths, encoder
        self._pixels = Decoded(pictures, encoder.preprocessing.picture, workers)

    def gather(self, images: np.ndarray) -> Tensor:
        """Encode pictures in any order; slow for many."""
        blocks = [self.stored(image, image + 1) for image in images.tolist()]
        return torch.cat(blocks).view(len(images), *self.shape[1:])

    def stored(self, first: int, last: int) -> Tensor:
        """Encode pictures `first` to `last - 1`. Worker processes decode on, so read the pictures in order."""
        return torch.cat([self._encoded(start, min(start + _BATCH, last)) for start in range(first, last, _BATCH)])

    def _encoded(self, first: int, last: int) -> Tensor:
        rows = self._encoder(torch.from_numpy(np.stack(list(self._pixels.take(first, last)))))
        finite = rows.isfinite().all(2).all(1)
        if not bool(finite.all()):
            image = first + int((~finite).nonzero()[0, 0])
            raise ValueError(f"{self._paths[image]}: the encoder returns values that are not finite")
        return rows.reshape(-1, self.shape[2])


class ResizedPictures(Features):
    """Pictures that are resized and compressed when they are read.

    Args:
        pictures: the pictures of a split.
        preprocessing: of the pictures.
        grid: patches per side; the pixels per side are a multiple.
        dtype: "jpeg" or "webp".
        quality: 1 to 100.
        workers: processes that decode and compress.
    """

    in_process = False
    counts = None
    dtype = torch.uint8

    def __init__(
        self,
        pictures: SplitPictures,
        preprocessing: Preprocessing | KeptProportions,
        grid: int,
        dtype: str,
        quality: int,
        workers: int,
    ) -> None:
        patch = preprocessing.side // grid
        self.shape = (len(pictures.paths), grid * grid, 3 * patch * patch)
        self.digest = sha256_of_parts(repr((preprocessing, grid, dtype, quality)).encode())
        crops = isinstance(preprocessing, Preprocessing) and preprocessing.shortest_edge is not None
        self.stretched = not crops  # Pictures that keep their proportions become squares when they are read.
        self._preprocessing = preprocessing
        self._files = Decoded(pictures, functools.partial(_compressed, preprocessing, dtype, quality), workers)

    def files(self, first: int, last: int, advance: Callable[[int], object]) -> Iterator[bytes]:
        """Yield the compressed files of pictures; `advance` is called with the size of each in pixels."""
        for file in self._files.take(first, last):
            advance(self.shape[1] * self.shape[2])
            yield file

    def gather(self, images: np.ndarray) -> Tensor:
        """Read patches as a store of these files does; slow for many."""
        blocks = [self.stored(image, image + 1) for image in images.tolist()]
        return torch.cat(blocks).view(len(images), *self.shape[1:])

    def stored(self, first: int, last: int) -> Tensor:
        side = self._preprocessing.side
        pixels = np.stack([as_square(decode_picture(file, side), side) for file in self._files.take(first, last)])
        return as_patches(pixels, math.isqrt(self.shape[1])).view(-1, self.shape[2])


def _compressed(preprocessing: Preprocessing | KeptProportions, dtype: str, quality: int, path: Path) -> bytes:
    return encode_picture(preprocessing.picture(path), dtype, quality)
