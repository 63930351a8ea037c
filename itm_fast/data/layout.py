"""Read and check the files of the published precomputed layout, one at a time.

Inside: `SUFFIXES`, `split_path`, `available_splits`, `map_floats`, `open_features`, `read_captions`,
`read_caption_image`, `match_counts`, `read_ids`, `read_region_counts`, `read_tags`, `zeros_advice`. For one line of a
file: `text_in`, `caption_in`, `image_row_in`, `region_count_in`, `tags_in`.

Every problem is a ValueError. Its one-line message names the file and, if known, the line (from 1) or the row (from 0).
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from itm_fast.files import regular
from itm_fast.files.arrays import map_npy

CAPTIONS_PER_IMAGE = 5
# The longest caption in characters, which bounds the time and memory that one line takes.
MAX_CAPTION_LENGTH = 100_000
# Images that are compared with their copies.
_SAMPLES = 16
# The files of a split. Only the first two are required.
SUFFIXES = ("ims.npy", "caps.txt", "cap2im.txt", "ids.txt", "regions.txt", "boxes.npy", "tags.txt")

Parsed = TypeVar("Parsed")

# The str() of a bytes object: the file was read as bytes and written back as text.
_BYTES_LITERAL = re.compile(r"[bB]'.*'|[bB]\".*\"", re.DOTALL)


def split_path(directory: str | os.PathLike[str], split: str, suffix: str) -> Path:
    """Return the path of one file of a split, such as `train_caps.txt` for the suffix `caps.txt`."""
    return Path(directory) / f"{split}_{suffix}"


def available_splits(directory: str | os.PathLike[str]) -> list[str]:
    """List the splits that have features and captions in `directory`, sorted."""
    # macOS writes files such as ._train_ims.npy beside others.
    splits = (path.name.removesuffix("_ims.npy") for path in Path(directory).glob("[!.]*_ims.npy"))
    return sorted(split for split in splits if regular.is_present(split_path(directory, split, "caps.txt")))


def check_split_name(split: str) -> None:
    """Raise ValueError if a split's name would lead out of the folder."""
    if split in ("", "..") or split != Path(split).name or "\0" in split:
        raise ValueError(f"split: expected a name such as test, without folders, got {split!r}")


def check_directory(directory: str | os.PathLike[str]) -> None:
    """Raise ValueError if there is no such directory, or a file in its place."""
    if not Path(directory).is_dir():
        found = "expected a data directory, found a file" if Path(directory).exists() else "no such data directory"
        raise ValueError(f"{directory}: {found}")


def check_split(directory: str | os.PathLike[str], split: str) -> None:
    """Raise ValueError if the directory or one of the two required files of a split is missing."""
    check_split_name(split)
    check_directory(directory)
    for suffix in SUFFIXES[:2]:
        path = split_path(directory, split, suffix)
        if not regular.is_present(path):
            found = ", ".join(available_splits(directory)) or "none"
            raise ValueError(f"{path}: no such file, so there is no split {split!r} (splits in {directory}: {found})")


def zeros_advice(split: str) -> str:
    """Return what to do about regions of zeros."""
    return f"if the zeros are padding, write the number of true regions of each row to {split}_regions.txt"


def map_floats(path: str | os.PathLike[str], what: str = "numbers") -> np.memmap:
    """Map an array of float16, float32 or float64 numbers. Only the header is read."""
    array = map_npy(path)
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise ValueError(f"{path}: expected float16, float32 or float64 {what}, got {array.dtype}")
    return array


def open_features(path: str | os.PathLike[str]) -> np.memmap:
    """Map `(n_rows, k, f)` float16, float32 or float64 features. Only the header is read."""
    features = map_floats(path, "features")
    if features.ndim != 3:
        raise ValueError(f"{path}: expected features of shape (images, regions, channels), got shape {features.shape}")
    if 0 in features.shape:
        raise ValueError(f"{path}: expected at least one image, region and channel, got shape {features.shape}")
    return features


def read_lines(path: str | os.PathLike[str]) -> list[bytes]:
    """Return the lines of a text file without line ends and without a byte order mark at the start."""
    try:
        content = regular.read_bytes(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    # Only "\n" and "\r\n" end a line: str.splitlines() also splits at separators that occur inside captions.
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    return lines


def text_in(line: bytes) -> str:
    """Return the stripped text of a line; raise ValueError if it is not UTF-8."""
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start}: {error.reason})") from None


def caption_in(line: bytes) -> str:
    """Return the caption of a line.

    Raises:
        ValueError: the line is not UTF-8, is empty, has more than `MAX_CAPTION_LENGTH` characters, or is the text of a
            bytes literal (`b'...'`).
    """
    caption = text_in(line)
    if not caption:
        raise ValueError("the caption is empty")
    if len(caption) > MAX_CAPTION_LENGTH:
        raise ValueError(f"expected a caption of at most {MAX_CAPTION_LENGTH:,} characters, got {len(caption):,}")
    if _BYTES_LITERAL.fullmatch(caption):
        raise ValueError(f"the caption is the text of a bytes literal ({caption[:40]}): write the decoded text instead")
    return caption


def image_row_in(line: bytes, n_images: int) -> int:
    """Return the image row in a line of `{split}_cap2im.txt`; raise ValueError if it is not from 0 to n_images - 1."""
    text = text_in(line)
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError(f"expected the row of an image, got {text[:40]!r}")
    if not 0 <= int(text) < n_images:
        raise ValueError(f"expected an image row from 0 to {n_images - 1}, got {int(text)}")
    return int(text)


def region_count_in(line: bytes, most: int) -> int:
    """Return the count in a line of `{split}_regions.txt`; raise ValueError if it is not from 1 to `most`."""
    text = text_in(line)
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise ValueError(f"expected a number of regions from 1 to {most}, got {text[:40]!r}")
    return int(text)


def tags_in(line: bytes) -> str:
    """Return the object tags in a line of `{split}_tags.txt`; "" for an image without tags.

    Raises:
        ValueError: the line is not UTF-8, or has more than `MAX_CAPTION_LENGTH` characters.
    """
    tags = text_in(line)
    if len(tags) > MAX_CAPTION_LENGTH:
        raise ValueError(f"expected tags of at most {MAX_CAPTION_LENGTH:,} characters, got {len(tags):,}")
    return tags


def _parsed(path: str | os.PathLike[str], lines: list[bytes], parse: Callable[[bytes], Parsed]) -> list[Parsed]:
    parsed = []
    for number, line in enumerate(lines, 1):
        try:
            parsed.append(parse(line))
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
    return parsed


def read_captions(path: str | os.PathLike[str]) -> list[str]:
    """Read one caption per line, as `caption_in` does."""
    lines = read_lines(path)
    if not lines:
        raise ValueError(f"{path}: expected at least one caption, the file is empty")
    return _parsed(path, lines, caption_in)


def read_caption_image(path: str | os.PathLike[str], n_images: int, n_captions: int) -> npt.NDArray[np.int64]:
    """Read the image row of each caption, `(n_captions,)`, from `{split}_cap2im.txt`: one integer per line."""
    lines = read_lines(path)
    if len(lines) != n_captions:
        raise ValueError(f"{path}: expected one line per caption ({n_captions}), got {len(lines)} lines")
    return np.array(_parsed(path, lines, lambda line: image_row_in(line, n_images)), dtype=np.int64)


def read_region_counts(path: str | os.PathLike[str], n_rows: int, most: int) -> npt.NDArray[np.int64]:
    """Read the regions of each row, `(n_rows,)`, from `{split}_regions.txt`: one number from 1 to `most` per line."""
    lines = read_lines(path)
    if len(lines) != n_rows:
        raise ValueError(f"{path}: expected one line per row of the features ({n_rows}), got {len(lines)} lines")
    return np.array(_parsed(path, lines, lambda line: region_count_in(line, most)), dtype=np.int64)


def read_tags(path: str | os.PathLike[str], n_images: int, stride: int) -> list[str]:
    """Read the object tags of each image from `{split}_tags.txt`: one line per image, or per row of the features."""
    lines = read_lines(path)
    if len(lines) not in (n_images, n_images * stride):
        raise ValueError(f"{path}: expected one line per image ({n_images}), got {len(lines)} lines")
    return _parsed(path, lines, tags_in)[:: len(lines) // n_images]


def match_counts(directory: str | os.PathLike[str], split: str, rows: np.memmap, n_captions: int) -> int:
    """Return how often the features store each image of a split without `{split}_cap2im.txt`: 1 or 5 times.

    Raises:
        ValueError: there are not five captions per image, or sampled rows are not one image repeated five times.
    """
    n_rows, path = len(rows), split_path(directory, split, "ims.npy")
    advice = f"write {split}_cap2im.txt with one image row per caption line"
    if n_captions == n_rows * CAPTIONS_PER_IMAGE:
        return 1
    if n_captions != n_rows or n_rows % CAPTIONS_PER_IMAGE:
        raise ValueError(
            f"{split_path(directory, split, 'caps.txt')}: {n_captions} captions do not fit {n_rows} rows of "
            f"{path.name}: expected {n_rows * CAPTIONS_PER_IMAGE} (five per image) or {n_rows} (images repeated "
            f"five times); otherwise {advice}"
        )
    image = repeated_image(rows)
    if image is not None:
        first = image * CAPTIONS_PER_IMAGE
        raise ValueError(
            f"{path}: as many rows as captions ({n_rows}), but rows {first} to {first + CAPTIONS_PER_IMAGE - 1} are "
            f"not one image repeated five times: {advice}"
        )
    return CAPTIONS_PER_IMAGE


def repeated_image(features: np.memmap) -> int | None:
    """Check that rows 5i to 5i+4 are equal for some images spread over the file.

    Returns:
        The first i whose rows differ, or None.
    """
    n_images = len(features) // CAPTIONS_PER_IMAGE
    for image in np.unique(np.linspace(0, n_images - 1, _SAMPLES).astype(np.int64)):
        group = features[image * CAPTIONS_PER_IMAGE : (image + 1) * CAPTIONS_PER_IMAGE]
        if not np.array_equal(group[1:], np.broadcast_to(group[:1], group[1:].shape), equal_nan=True):
            return int(image)
    return None


def read_ids(
    path: str | os.PathLike[str], n_images: int, stride: int, caption_image: npt.NDArray[np.int64]
) -> list[str] | None:
    """Read the name of each image from `{split}_ids.txt`: one per image, per row or per caption.

    Returns:
        The names; None if they differ between the captions of one image, as they then are names of captions.
    """
    names = _parsed(path, read_lines(path), text_in)
    if len(names) == n_images:
        return names
    if len(names) == n_images * stride:
        owner = np.arange(len(names)) // stride
    elif len(names) == len(caption_image):
        owner = caption_image
    else:
        counts = dict.fromkeys((n_images, n_images * stride, len(caption_image)))
        expected = " or ".join(map(str, counts))
        raise ValueError(f"{path}: expected one id per image or per caption ({expected} lines), got {len(names)}")
    images: list[str | None] = [None] * n_images
    for name, image in zip(names, owner, strict=True):
        if images[image] not in (None, name):
            return None
        images[image] = name
    return None if None in images else [name for name in images if name is not None]
