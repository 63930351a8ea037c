"""Sources of region features: an array, which may be a memory map, or tensors in host or device memory.

Inside: `Features`, `ArrayFeatures`, `ResidentFeatures`, `as_regions`.
"""

from __future__ import annotations

import abc
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itm_fast.data.picture_augmentation import PictureAugmentation
from itm_fast.fragments import Fragments

# Approximate size of the blocks in which rows are read.
BLOCK_BYTES = 16 * 2**20


class Features(abc.ABC):
    """Region features of images. Batches are float32, or bfloat16 if stored so and `keep_bfloat16` is set.

    Attributes:
        shape: (images, regions, channels); `regions` is the maximum per image.
        counts: (images,) int64, the regions of each image; None if all have the same number.
        dtype: the stored type.
        in_process: reading needs no worker processes, because it releases the Python lock or only copies memory.
        stretched: the features are pictures that were scaled to squares, whatever their proportions.
        encoder: the vision model that made the features, as `PictureEncoder.kind`; "" if that is unknown.
    """

    shape: tuple[int, int, int]
    counts: np.ndarray | None
    dtype: torch.dtype
    in_process: bool
    keep_bfloat16 = False
    stretched = False
    encoder = ""

    @property
    def batch_dtype(self) -> torch.dtype:
        """The dtype that `gather` returns."""
        return self.dtype if self.keep_bfloat16 and self.dtype == torch.bfloat16 else torch.float32

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def n_regions(self) -> int:
        """The number of regions of all images."""
        return self.shape[0] * self.shape[1] if self.counts is None else int(self.counts.sum())

    @property
    def nbytes(self) -> int:
        """The size of all features in bytes, as stored."""
        return self.n_regions * self.shape[2] * self.dtype.itemsize

    @abc.abstractmethod
    def gather(self, images: np.ndarray) -> Tensor | Fragments:
        """Read the features of images.

        Args:
            images: (n,) int64.

        Returns:
            (n, k, f) of `batch_dtype` in the order of `images`, or Fragments if the images differ in regions.

        Raises:
            ValueError: a value is not finite in float32, or a file has changed. The message names file and row.
        """

    def augmented(
        self, images: np.ndarray, indices: np.ndarray, augmentation: PictureAugmentation
    ) -> Tensor | Fragments:
        """Read the pictures of images, and augment each by its index of `indices`, (n,) int64.

        Raises:
            ValueError: as `gather`; or these are no stored pictures.
        """
        raise ValueError(
            "picture_augmentation: expected none, as these features are no pictures that data import stored"
        )

    def pin_batches(self) -> None:  # noqa: B027
        """Return page-locked memory from `gather` from now on, if that needs no extra copy; otherwise do nothing."""

    @abc.abstractmethod
    def stored(self, first: int, last: int) -> Tensor:
        """Return the regions (N, f) of images `first` to `last - 1` in the stored type, all finite."""


def as_regions(
    rows: Tensor, counts: np.ndarray | None, shape: tuple[int, int, int], n_images: int
) -> Tensor | Fragments:
    """Turn the regions (N, f) of `n_images` images into a batch; `counts` are the regions of these images."""
    if counts is None:
        return rows.view(n_images, *shape[1:])
    offsets = torch.zeros(n_images + 1, dtype=torch.int64)
    torch.cumsum(torch.from_numpy(counts), 0, out=offsets[1:])
    return Fragments(rows, offsets.to(rows.device), check=False, max_length=int(counts.max()) if n_images else 0)


class ArrayFeatures(Features):
    """Features in an array. A memory map stays on disk.

    Args:
        array: (n_images, k, f) floats.
        name: the file, for messages.
        counts: (n_images,) int64, how many of its k regions each image has; None: all.
        row: maps an image to its row in the file, for messages.
    """

    in_process = False

    def __init__(
        self, array: np.ndarray, name: str, counts: np.ndarray | None = None, row: Callable[[int], int] = int
    ) -> None:
        self.array, self.name, self.counts, self._row = array, name, counts, row
        self._map: mmap.mmap | None = getattr(array, "_mmap", None)
        self._bytes = 0 if self._map is None else self._map.size()
        self.shape = (int(array.shape[0]), int(array.shape[1]), int(array.shape[2]))
        self.dtype = {2: torch.float16, 4: torch.float32}.get(array.dtype.itemsize, torch.float64)

    def __getstate__(self) -> dict[str, Any]:
        # The copy of a memory map is an array in memory.
        return {**self.__dict__, "_map": None, "_bytes": 0}

    def gather(self, images: np.ndarray) -> Tensor | Fragments:
        counts = None if self.counts is None else self.counts[images]
        if counts is None:
            gathered = np.empty((len(images), *self.shape[1:]), dtype=np.float32)
        else:
            ends = np.cumsum(counts)
            gathered = np.empty((int(ends[-1]) if len(ends) else 0, self.shape[2]), dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            # Read a file in its own order, whatever the order of `images`.
            for position in np.argsort(images, kind="stable"):
                self._check_size(int(images[position]))
                if counts is None:
                    gathered[position] = self.array[images[position]]
                else:
                    start = ends[position] - counts[position]
                    gathered[start : ends[position]] = self.array[images[position], : counts[position]]
            # A quick sum is not finite if a value is not. Finite values may overflow it, so an exact check decides.
            suspicious = not np.isfinite(np.einsum("i->", gathered.reshape(-1)))
        if suspicious and not np.isfinite(gathered).all():
            raise self._not_finite(images)
        rows = torch.from_numpy(gathered)
        return rows if counts is None else as_regions(rows, counts, self.shape, len(images))

    def _check_size(self, image: int) -> None:
        """Raise ValueError if the mapped file has become shorter: reading past its end would kill the process."""
        if self._map is not None and (size := self._map.size()) < self._bytes:
            raise ValueError(
                f"{self.name}: row {self._row(image)} cannot be read: the file was truncated since it was opened "
                f"(expected {self._bytes:,} bytes, found {size:,})"
            )

    def _not_finite(self, images: np.ndarray) -> ValueError:
        """Return the error that names the first of `images` with a value that is not finite."""
        for image in np.unique(images):
            regions = self.array[image] if self.counts is None else self.array[image, : self.counts[image]]
            with np.errstate(over="ignore", invalid="ignore"):
                if not np.isfinite(regions.astype(np.float32)).all():
                    break
        return ValueError(f"{self.name}: row {self._row(int(image))} holds values that are not finite in float32")

    def stored(self, first: int, last: int) -> Tensor:
        self._check_size(first)
        # torch only supports the byte order of the machine.
        block = np.array(self.array[first:last], dtype=self.array.dtype.newbyteorder("="))
        with np.errstate(over="ignore", invalid="ignore"):
            finite = np.isfinite(block.astype(np.float32, copy=False))
        if self.counts is None:
            rows, finite = block.reshape(-1, self.shape[2]), finite.reshape(-1, self.shape[2])
        else:
            kept = np.arange(self.shape[1]) < self.counts[first:last, None]
            rows, finite = block[kept], finite[kept]
        if not finite.all():
            raise self._not_finite(np.arange(first, last))
        return torch.from_numpy(rows)


class ResidentFeatures(Features):
    """Features in memory, in the stored type.

    Args:
        values: (N, f), the regions of all images end to end.
        shape: (images, regions, channels).
        counts: (images,) int64, the regions of each image; None if all have the same number.
        device: the device of the batches.
        by_image: copy each image to `device` separately. From page-locked host memory to a GPU, the GPU moves the data.
    """

    in_process = True

    def __init__(
        self,
        values: Tensor,
        shape: tuple[int, int, int],
        counts: np.ndarray | None,
        device: torch.device,
        *,
        by_image: bool = False,
    ) -> None:
        self.values, self.shape, self.counts, self.device = values, shape, counts, device
        self.dtype = values.dtype
        lengths = np.full(shape[0], shape[1]) if counts is None else counts
        self._ends = np.cumsum(lengths)
        # Split once: splitting for each batch would take as long as starting its copies.
        self._images = values.split(lengths.tolist()) if by_image else None

    def gather(self, images: np.ndarray) -> Tensor | Fragments:
        counts = None if self.counts is None else self.counts[images]
        if self._images is None:
            rows = self.values.index_select(0, torch.from_numpy(self._rows(images)).to(self.device))
        else:
            lengths = np.full(len(images), self.shape[1]) if counts is None else counts
            rows = torch.empty(int(lengths.sum()), self.shape[2], dtype=self.dtype, device=self.device)
            if len(images):
                # One call for all copies takes the Python lock, which the training step needs, only once.
                parts = [self._images[image] for image in images.tolist()]
                torch._foreach_copy_(rows.split(lengths.tolist()), parts, non_blocking=True)
        return as_regions(rows.to(self.batch_dtype), counts, self.shape, len(images))

    def _rows(self, images: np.ndarray) -> np.ndarray:
        """Return the positions in `values` of the regions of `images`."""
        if self.counts is None:
            return (images[:, None] * self.shape[1] + np.arange(self.shape[1])).reshape(-1)
        lengths = self.counts[images]
        steps = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.repeat(self._ends[images] - lengths, lengths) + steps

    def stored(self, first: int, last: int) -> Tensor:
        start = 0 if first == 0 else int(self._ends[first - 1])
        return self.values[start : int(self._ends[last - 1])]
