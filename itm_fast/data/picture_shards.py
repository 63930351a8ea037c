"""Shards of pictures in a store: JPEG or WebP files end to end, memory-mapped, decoded when a batch is read.

Inside: `encode_picture`, `decode_picture`, `as_square`, `as_patches`, `write_shard`, `StoredPictures`.

A shard is a safetensors file: "lengths" (n,) int64, and "data" uint8, the files end to end. A store of pictures has
the manifest and the index of a feature store; its `dtype` is the format. Each picture is a square grid of square
patches, and each patch is a region of raw pixels.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from itm_fast.data.features import Features
from itm_fast.data.picture_augmentation import PictureAugmentation
from itm_fast.data.store_format import PICTURES, ShardRecord, SplitRecord, check_shard
from itm_fast.files import atomic, regular

__all__ = ["StoredPictures", "as_patches", "as_square", "decode_picture", "encode_picture", "write_shard"]

_MAX_HEADER_BYTES = 4096
# Mapped shards at a time. Each takes a file handle, of which a process often may have 1,024.
_MOST_MAPPED = 256


def encode_picture(pixels: np.ndarray, dtype: str, quality: int) -> bytes:
    """Return the content of a JPEG or WebP file of pixels (height, width, 3) uint8."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, PICTURES[dtype], quality=quality)
    return buffer.getvalue()


def decode_picture(content: bytes, side: int) -> np.ndarray:
    """Return the pixels (height, width, 3) uint8 of a stored file, the longer of whose sides has `side` pixels.

    Raises:
        ValueError: the file is damaged, or has another size.
    """
    try:
        with Image.open(io.BytesIO(content), formats=list(PICTURES.values())) as opened:
            if max(opened.size) != side:
                raise ValueError(f"expected {side} x {side} pixels, got {opened.width} x {opened.height}")
            return np.array(opened.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from None


def as_square(pixels: np.ndarray, side: int) -> np.ndarray:
    """Return (height, width, 3) uint8 scaled to (side, side, 3), whatever the proportions."""
    if pixels.shape[:2] == (side, side):
        return pixels
    return np.array(Image.fromarray(pixels).resize((side, side)))


def as_patches(pixels: np.ndarray, grid: int) -> Tensor:
    """Cut pixels (n, side, side, 3) uint8 into patches (n, grid * grid, patch * patch * 3) float32, from -1 to 1."""
    n, patch = len(pixels), pixels.shape[1] // grid
    cells = torch.from_numpy(pixels).view(n, grid, patch, grid, patch, 3).transpose(2, 3)
    return cells.reshape(n, grid * grid, 3 * patch * patch).to(torch.float32) / 127.5 - 1


def write_shard(path: Path, files: Iterator[bytes], regions: int) -> ShardRecord:
    """Write the files of consecutive pictures as a shard; `regions` is the total number of their patches."""
    contents = list(files)
    lengths = np.array([len(content) for content in contents], dtype="<i8")
    ends = [lengths.nbytes, lengths.nbytes + int(lengths.sum())]
    header = json.dumps(
        {
            "lengths": {"dtype": "I64", "shape": [len(contents)], "data_offsets": [0, ends[0]]},
            "data": {"dtype": "U8", "shape": [ends[1] - ends[0]], "data_offsets": ends},
        },
        separators=(",", ":"),
    ).encode()
    header += b" " * (-len(header) % 8)
    parts = [len(header).to_bytes(8, "little"), header, lengths.tobytes(), *contents]
    digest = hashlib.sha256()
    atomic.remove_temporaries(path)
    with atomic.atomic_file(path) as file:
        for part in parts:
            digest.update(part)
            file.write(part)
    return ShardRecord(path.name, len(contents), regions, sum(map(len, parts)), digest.hexdigest())


def _starts(path: Path, shard: ShardRecord) -> np.ndarray:
    """Return the byte at which each picture of a shard starts, and the end of the last, (n + 1,) int64."""
    with regular.open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        file.seek(8 + min(length, _MAX_HEADER_BYTES))
        lengths = np.frombuffer(file.read(8 * shard.images), dtype="<i8")
    starts = np.concatenate([[8 + length + 8 * shard.images], lengths]).cumsum()
    if length > _MAX_HEADER_BYTES or len(lengths) != shard.images or lengths.min() < 1 or starts[-1] != shard.bytes:
        raise ValueError(f"{path}: not the shard that the store wrote: its header or its lengths differ")
    return starts


class StoredPictures(Features):
    """Pictures in the shards of a split. A batch has their patches as regions of normalised pixels.

    A region has the red, green and blue values of its pixels, row by row, from -1 to 1. Region `grid * r + c` is the
    patch in row r and column c.

    Args:
        directory: the store.
        dtype: "jpeg" or "webp".
        split: the split's record in the manifest.
        stretched: as in the manifest.

    Attributes:
        grid, side: patches and pixels per side.

    Raises:
        ValueError: a shard is missing, truncated, or not the one that the store wrote. The message names it.
    """

    in_process = False
    counts = None
    dtype = torch.float32

    def __init__(self, directory: Path, dtype: str, split: SplitRecord, stretched: bool = False) -> None:
        self.stretched = stretched
        self.shape = (split.images, split.regions, split.width)
        self._paths = [directory / shard.file for shard in split.shards]
        for path, shard in zip(self._paths, split.shards, strict=True):
            check_shard(path, dtype, shard, split.width)
        self._maps: dict[int, np.memmap] = {}
        self._starts = [_starts(path, shard) for path, shard in zip(self._paths, split.shards, strict=True)]
        images = np.array([shard.images for shard in split.shards])
        self._firsts = np.cumsum(images) - images
        self._file = np.repeat(np.arange(len(images)), images)
        self.grid = math.isqrt(split.regions)
        self.side = self.grid * math.isqrt(split.width // 3)

    def keep(self, n_images: int) -> None:
        """Drop all images but the first `n_images`."""
        self.shape = (n_images, *self.shape[1:])

    def picture(self, image: int) -> np.ndarray:
        """Decode a picture, (side, side, 3) uint8; one stored with its proportions is scaled to a square.

        Raises:
            ValueError: as `whole_picture`.
        """
        return as_square(self.whole_picture(image), self.side)

    def whole_picture(self, image: int) -> np.ndarray:
        """Decode a picture as it is stored, (height, width, 3) uint8.

        Raises:
            ValueError: the shard is damaged. The message names it and the picture's row.
        """
        shard = int(self._file[image])
        first, last = self._starts[shard][image - int(self._firsts[shard]) :][:2].tolist()
        try:
            if self._paths[shard].stat().st_size < last:
                raise ValueError("the file was truncated since it was opened")
            return decode_picture(self._mapped(shard)[first:last].tobytes(), self.side)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.place_of(image)} cannot be decoded ({error!s:.100})") from None

    def _mapped(self, shard: int) -> np.memmap:
        """Map a shard, and let go of the one that was used least recently if there are many."""
        found = self._maps.pop(shard, None)
        if found is None:
            found = np.memmap(self._paths[shard], dtype=np.uint8, mode="r")
            if len(self._maps) >= _MOST_MAPPED:
                del self._maps[next(iter(self._maps))]
        self._maps[shard] = found
        return found

    def gather(self, images: np.ndarray) -> Tensor:
        return self.augmented(images, images, None)

    def augmented(self, images: np.ndarray, indices: np.ndarray, augmentation: PictureAugmentation | None) -> Tensor:
        """Read pictures as `gather` does, and augment each by its index of `indices`, (n,) int64."""
        pixels = np.empty((len(images), self.side, self.side, 3), dtype=np.uint8)
        for position in np.argsort(images, kind="stable"):
            picture = self.picture(int(images[position]))
            pixels[position] = picture if augmentation is None else augmentation(picture, int(indices[position]))
        return as_patches(pixels, self.grid)

    def stored(self, first: int, last: int) -> Tensor:
        return self.gather(np.arange(first, last)).view(-1, self.shape[2])

    def place_of(self, image: int) -> str:
        """Return the shard of a picture and its row there, for messages."""
        shard = int(self._file[image])
        return f"{self._paths[shard]}: row {image - int(self._firsts[shard])} (image {image})"
