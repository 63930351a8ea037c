"""Features and captions of one split in the published precomputed layout.

Inside: `Batch`, `PrecomputedDataset`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from . import layout
from .vocabulary import Vocabulary

Indices = Tensor | np.ndarray | Sequence[int]


@attrs.frozen(eq=False)
class Batch:
    """n captions, each with its image.

    features (n, k, f) float32; token_ids (n, L) int64, padded with the vocabulary's `<pad>`; lengths (n,) int64,
    `<start>` and `<end>` counted; image_index and caption_index (n,) int64: which image and caption of the split.
    """

    features: Tensor
    token_ids: Tensor
    lengths: Tensor
    image_index: Tensor
    caption_index: Tensor

    def __len__(self) -> int:
        return len(self.caption_index)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on `device`."""
        return Batch(*(tensor.to(device, non_blocking=non_blocking) for tensor in self._tensors()))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory; `torch.utils.data.DataLoader(pin_memory=True)` calls this."""
        return Batch(*(tensor.pin_memory() for tensor in self._tensors()))

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.features, self.token_ids, self.lengths, self.image_index, self.caption_index


class PrecomputedDataset:
    """One split: memory-mapped features, and captions as token ids in memory. An item is a caption.

    Which image a caption belongs to: `{split}_cap2im.txt` where present, one image row per caption line. Otherwise
    there are five captions an image, caption j belongs to image j // 5, and the features hold each image once or, as
    some published files do, five times in a row (sampled rows are compared, then every fifth row is used).

    Args:
        directory: holds `{split}_ims.npy`, `{split}_caps.txt` and, optionally, `{split}_cap2im.txt`, `{split}_ids.txt`.
        split: "train", "dev", "test", "testall" or any other prefix of these files.
        vocabulary: turns the captions into token ids.
        max_images: use only the first images and their captions (published code validates on 1000 images of `dev`).

    Attributes:
        features: np.memmap (n_images, k, f), float16, float32 or float64, never read whole.
        captions: list of str. caption_image: (n_captions,) int64 tensor. image_ids: list of str, or None.
        n_images: the number of images; `len()` is the number of captions.

    Raises:
        ValueError: the files are missing, damaged, or do not fit each other; the message names file and line or row.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        split: str,
        vocabulary: Vocabulary,
        *,
        max_images: int | None = None,
    ) -> None:
        if max_images is not None and max_images < 1:
            raise ValueError(f"max_images: expected at least 1, got {max_images}")
        layout.check_split(directory, split)
        self.directory, self.split, self.vocabulary = Path(directory), split, vocabulary
        self.features_path = layout.split_path(directory, split, "ims.npy")
        self.captions = layout.read_captions(layout.split_path(directory, split, "caps.txt"))
        rows = layout.open_features(self.features_path)
        caption_image, self._stride = self._match(rows)
        n_images = len(rows) // self._stride
        ids_path = layout.split_path(directory, split, "ids.txt")
        self.image_ids: list[str] | None = None
        if ids_path.is_file():
            self.image_ids = layout.read_ids(ids_path, n_images, self._stride, caption_image)

        self.n_images = n_images if max_images is None else min(n_images, max_images)
        if self.n_images < n_images:
            kept = np.flatnonzero(caption_image < self.n_images)
            self.captions = [self.captions[index] for index in kept]
            caption_image = caption_image[kept]
            self.image_ids = self.image_ids[: self.n_images] if self.image_ids is not None else None
        self.features = rows[:: self._stride][: self.n_images]
        self.caption_image = torch.from_numpy(caption_image)

        encoded = [vocabulary.encode(caption) for caption in self.captions]
        self.caption_lengths = torch.tensor([len(ids) for ids in encoded])
        self._offsets = torch.zeros(len(encoded) + 1, dtype=torch.int64)
        torch.cumsum(self.caption_lengths, 0, out=self._offsets[1:])
        self._token_ids = torch.tensor([index for ids in encoded for index in ids], dtype=torch.int32)

    def _match(self, rows: np.memmap) -> tuple[np.ndarray, int]:
        """The image of each caption, and how often each image stands in the file."""
        n_rows, n_captions, per_image = len(rows), len(self.captions), layout.CAPTIONS_PER_IMAGE
        cap2im = layout.split_path(self.directory, self.split, "cap2im.txt")
        if cap2im.is_file():
            return layout.read_caption_image(cap2im, n_rows, n_captions), 1
        advice = f"write {cap2im.name} with one image row per caption line"
        if n_captions == n_rows * per_image:
            stride = 1
        elif n_captions == n_rows and n_rows % per_image == 0:
            stride = per_image
            image = layout.repeated_image(rows)
            if image is not None:
                raise ValueError(
                    f"{self.features_path}: as many rows as captions ({n_rows}), but rows {image * per_image} to "
                    f"{image * per_image + per_image - 1} are not one image repeated five times: {advice}"
                )
        else:
            captions = layout.split_path(self.directory, self.split, "caps.txt")
            raise ValueError(
                f"{captions}: {n_captions} captions do not fit {n_rows} rows of {self.features_path.name}: "
                f"expected {n_rows * per_image} (five an image) or {n_rows} (images repeated five times); else {advice}"
            )
        return np.arange(n_captions, dtype=np.int64) // per_image, stride

    def __len__(self) -> int:
        return len(self.captions)

    def __repr__(self) -> str:
        size = f"{self.n_images} images, {len(self)} captions"
        return f"PrecomputedDataset({str(self.directory)!r}, {self.split!r}: {size})"

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map would be a copy of the whole file; a worker process maps the file again instead.
        return {name: value for name, value in self.__dict__.items() if name != "features"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.features = layout.open_features(self.features_path)[:: self._stride][: self.n_images]

    def image_batch(self, image_indices: Indices) -> Tensor:
        """Features (n, k, f) float32 of images; ValueError naming file and row where one is not finite."""
        wanted = _as_indices(image_indices, self.n_images, "image_indices")
        # The file is read in its own order, and once per image however often it is asked for.
        images, positions = np.unique(wanted, return_inverse=True)
        gathered = np.ascontiguousarray(self.features[images], dtype=np.float32)
        # One sum in float64, which finite float32 values cannot overflow, shows whether any value is not finite.
        if not np.isfinite(gathered.sum(dtype=np.float64)):
            bad = int(images[~np.isfinite(gathered).all(axis=(1, 2))][0]) * self._stride
            raise ValueError(f"{self.features_path}: row {bad} holds values that are not finite in float32")
        if len(images) == len(wanted) and np.array_equal(images, wanted):
            return torch.from_numpy(gathered)
        return torch.from_numpy(gathered)[torch.from_numpy(positions.reshape(-1))]

    def caption_batch(self, caption_indices: Indices) -> tuple[Tensor, Tensor]:
        """Token ids (n, L) int64, padded with the vocabulary's `<pad>` to the longest, and lengths (n,) int64."""
        wanted = torch.from_numpy(_as_indices(caption_indices, len(self), "caption_indices"))
        lengths = self.caption_lengths[wanted]
        columns = torch.arange(int(lengths.max()) if len(wanted) else 0)
        inside = columns < lengths[:, None]
        token_ids = torch.full(inside.shape, self.vocabulary.pad, dtype=torch.int64)
        token_ids[inside] = self._token_ids[(self._offsets[wanted][:, None] + columns)[inside]].to(torch.int64)
        return token_ids, lengths

    def batch(self, caption_indices: Indices) -> Batch:
        """Captions and their images; an image stands once for each of its captions asked for."""
        captions = torch.from_numpy(_as_indices(caption_indices, len(self), "caption_indices"))
        token_ids, lengths = self.caption_batch(captions)
        images = self.caption_image[captions]
        return Batch(self.image_batch(images), token_ids, lengths, images, captions)


def _as_indices(indices: Indices, size: int, name: str) -> np.ndarray:
    array = np.asarray(indices)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    array = array.astype(np.int64)
    if array.size and (array.min() < 0 or array.max() >= size):
        raise ValueError(f"{name}: expected values from 0 to {size - 1}, got {array.min()} to {array.max()}")
    return array
