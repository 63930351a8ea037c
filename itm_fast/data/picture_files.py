"""Decode picture files: upright RGB from any format that Pillow reads. Several processes decode ahead.

Inside: `open_picture`, `check_start`, `readable_formats`, `look_at`, `Look`, `decoded`, `near_duplicates`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import attrs
import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from torch.utils.data import DataLoader, Dataset

from itm_fast.data.loading import _follow_main_process, _signals_blocked
from itm_fast.files import regular
from itm_fast.files.messages import shortened
from itm_fast.files.processors import check_count

__all__ = ["Look", "check_start", "decoded", "look_at", "near_duplicates", "open_picture", "readable_formats"]

Result = TypeVar("Result")

# More pixels are refused before they are decoded: a small file may claim to contain terabytes.
MAX_PIXELS = 100_000_000
# Of the longer side to the shorter one: scaled by its shorter side, a thin picture would fill the memory.
MOST_STRETCHED = 100
_SIXTEEN_BITS = ("I", "I;16", "I;16L", "I;16B", "I;16N")
# A tag of TIFF files: the mode I of Pillow does not say whether pixels have 16 or 32 bits.
_BITS_PER_SAMPLE = 258
# Two pictures are near-duplicates if few of their 64 hash bits differ, and so do their 8 x 8 thumbnails.
_HASH_BITS, _THUMBNAIL_LEVELS = 3, 6.0
_BITS = np.array([number.bit_count() for number in range(2**16)], dtype=np.uint8)


def open_picture(path: Path, content: bytes | Image.Image | None = None) -> Image.Image:
    """Decode a picture as upright RGB.

    EXIF orientation is applied, transparent pixels are put on white, CMYK is converted, and 16 bits per channel are
    scaled to 8. Of an animation, the first frame is used, or the one that Pillow shows of an opened picture. EPS and
    pixels of 32 bits are not read.

    Args:
        path: the file.
        content: its content, if it has been read; or the picture, if Pillow has opened it, which stays open.

    Raises:
        ValueError: the file cannot be read or decoded, is truncated, or has too many pixels. The message names it.
    """
    with _opened(path, _content(path) if content is None else content) as image:
        is_deep = image.mode == "F" or 32 in getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, ())
        image.load()
        return _as_rgb(_upright(image), is_deep)


def _upright(image: Image.Image) -> Image.Image:
    """Return a decoded picture as its EXIF orientation says; as it is, if its EXIF data cannot be read."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        # Pillow has several exceptions for damaged metadata. The pixels are complete.
        return image


def check_start(path: Path) -> None:
    """Raise ValueError if a file does not begin like a picture that `open_picture` decodes. The rest is not decoded."""
    try:
        with regular.open_file(path) as file, _opened(path, file):
            pass
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def _opened(path: Path, content: bytes | Image.Image | BinaryIO) -> Iterator[Image.Image]:
    """Yield a picture that is not decoded yet. Errors of the block become those of `open_picture`."""
    if isinstance(content, Image.Image):
        if not all(content.size):
            raise ValueError(f"{path}: a picture of zero width or height")
        if content.format is not None and content.format not in readable_formats():
            raise ValueError(f"{path}: pictures in the format {content.format} are not read")
    elif content == b"" or (not isinstance(content, bytes) and not os.fstat(content.fileno()).st_size):
        raise ValueError(f"{path}: an empty file, not a picture")
    with warnings.catch_warnings():
        # Of Pillow, on metadata that is not used; the number of pixels is checked below.
        warnings.simplefilter("ignore")
        try:
            with (
                contextlib.nullcontext(content)
                if isinstance(content, Image.Image)
                else Image.open(
                    io.BytesIO(content) if isinstance(content, bytes) else content, formats=readable_formats()
                )
            ) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise Image.DecompressionBombError
                if max(image.size) > MOST_STRETCHED * min(image.size):
                    raise ValueError(
                        f"{image.width} x {image.height} pixels: a side is more than {MOST_STRETCHED} times the other"
                    )
                yield image
        except UnidentifiedImageError:
            raise ValueError(
                f"{path}: not a picture in a format that Pillow reads, or of zero width or height"
            ) from None
        except Image.DecompressionBombError:
            raise ValueError(f"{path}: a picture of more than {MAX_PIXELS:,} pixels; scale it down first") from None
        except Exception as error:
            # Each decoder has exceptions of its own for damaged files and for kinds that it lacks.
            raise ValueError(f"{path}: the picture cannot be decoded ({shortened(str(error))})") from None


@functools.cache
def readable_formats() -> tuple[str, ...]:
    """Return Pillow's names of the formats that are read.

    Pillow recognises HDF5, MPEG, GRIB, BUFR and WMF but cannot decode them. For EPS, it runs Ghostscript.
    """
    Image.init()
    return tuple(
        name for name, (opener, _) in Image.OPEN.items() if name not in ("EPS", "MPEG") and not _is_stub(opener)
    )


def _is_stub(opener: object) -> bool:
    return isinstance(opener, type) and issubclass(opener, ImageFile.StubImageFile)


def _content(path: Path) -> bytes:
    try:
        return regular.read_bytes(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def _as_rgb(image: Image.Image, is_deep: bool) -> Image.Image:
    """Convert a picture; `is_deep`: its pixels have 32 bits."""
    if image.mode in (*_SIXTEEN_BITS, "F"):
        numbers = np.asarray(image)
        # Nothing in such a file tells the number that is white.
        if is_deep or not 0 <= int(numbers.min()) <= int(numbers.max()) < 2**16:
            raise ValueError(
                f"pixels of 32 bits, from {numbers.min():g} to {numbers.max():g}; convert it to 8 or 16 bits"
            )
        grey = (numbers.astype(np.uint16) >> 8).astype(np.uint8)
        transparent = image.info.get("transparency")
        if transparent is not None:
            grey[numbers == transparent] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


@attrs.frozen(eq=False)
class Look:
    """What a first look at a picture finds.

    Attributes:
        digest: SHA-256 of the file.
        hash: 64-bit difference hash: whether each pixel of 9 x 8 grey ones is brighter than its right neighbour.
        thumbnail: (192,) uint8, the colours of 8 x 8 pixels.
    """

    digest: bytes
    hash: int
    thumbnail: np.ndarray


def look_at(path: Path) -> Look:
    """Decode a picture once; raise ValueError as `open_picture`."""
    content = _content(path)
    image = open_picture(path, content)
    grey = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX), dtype=np.int16)
    bits = np.packbits(grey[:, :-1] > grey[:, 1:])
    thumbnail = np.asarray(image.resize((8, 8), Image.Resampling.BOX)).reshape(-1)
    return Look(hashlib.sha256(content).digest(), int.from_bytes(bits.tobytes(), "big"), thumbnail)


class _Pictures(Dataset[Result | ValueError], Generic[Result]):
    def __init__(self, paths: Sequence[Path], make: Callable[[Path], Result]) -> None:
        self.paths, self.make = paths, make

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Result | ValueError:
        # Passed as a value, because a worker process would pass on an exception with its traceback as the message.
        try:
            return self.make(self.paths[index])
        except ValueError as error:
            return error


def _as_it_is(item: Result) -> Result:
    return item


def decoded(paths: Sequence[Path], make: Callable[[Path], Result], workers: int) -> Iterator[Result | ValueError]:
    """Yield `make(path)` for each path in order, or the ValueError that it raised.

    Args:
        paths: the files.
        make: a function that worker processes can call.
        workers: processes; 0: this process.
    """
    check_count("workers", workers)
    loader: DataLoader[Result | ValueError] = DataLoader(
        _Pictures(paths, make),
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=8 if workers else None,
        worker_init_fn=_follow_main_process,
    )
    with _signals_blocked():
        items = iter(loader)
    try:
        yield from items
    finally:
        # This ends the worker processes, even if a caller keeps the exception.
        del items


def near_duplicates(left: Sequence[Look], right: Sequence[Look]) -> list[tuple[int, int]]:
    """Return pairs of indices of pictures that look the same, for each of `right` at most one of `left`."""
    if not left or not right:
        return []
    parts, own_parts = (_parts_of_hashes(looks) for looks in (left, right))
    thumbnails = np.stack([look.thumbnail for look in left]).astype(np.int16)
    # At most three bits differ: at least one of the four parts is equal.
    orders = parts.argsort(axis=0, kind="stable")
    ordered = np.take_along_axis(parts, orders, axis=0)
    bounds = [
        [np.searchsorted(ordered[:, part], own_parts[:, part], side) for side in ("left", "right")]
        for part in range(parts.shape[1])
    ]
    found = []
    for index, look in enumerate(right):
        near = [orders[first[index] : last[index], part] for part, (first, last) in enumerate(bounds)]
        candidates = np.unique(np.concatenate(near))
        different = _BITS[parts[candidates] ^ own_parts[index]].sum(1)
        candidates = candidates[different <= _HASH_BITS]
        if len(candidates):
            levels = np.abs(thumbnails[candidates] - look.thumbnail).mean(1)
            nearest = int(levels.argmin())
            if levels[nearest] <= _THUMBNAIL_LEVELS:
                found.append((int(candidates[nearest]), index))
    return found


def _parts_of_hashes(looks: Sequence[Look]) -> np.ndarray:
    """Return the hashes as parts of 16 bits, (n, 4)."""
    return np.array([look.hash for look in looks], dtype=np.uint64).view(np.uint16).reshape(-1, 4)
