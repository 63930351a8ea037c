"""A real data set in the package: emoji of the Noto Color Emoji font, described by Unicode CLDR.

Inside: `pictures`, `names`, `captions`, `image_ids`, `patches`, `pictures_of`, `picture_if_patches`, `picture_png`,
`load`, `write_dataset`, `write_pictures`.

3,621 distinct pictures of 72 x 72 pixels on white have five English captions each. The splits are fixed: "train" has
2,821 pictures, "dev" 300 and "test" 500. A picture is in one split only. All words of the names in dev and test occur
in train; only their combinations are new. `docs/guides/data.md` describes the data. The folder of the files contains
their licences.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from itm_fast.data.dataset import CaptionDataset
from itm_fast.data.layout import CAPTIONS_PER_IMAGE, open_features, read_captions, split_path
from itm_fast.data.store_format import refuse_store
from itm_fast.data.vocabulary import Vocabulary
from itm_fast.files import atomic, regular

SPLITS = ("train", "dev", "test")
SIZE = 72  # pixels of a side
GRID = 6  # patches of a side
PATCH = SIZE // GRID  # pixels of a patch's side

# Mean and standard deviation of all values of the training pictures, from 0 to 255.
MEAN, STD = 199.8, 78.5
# The distance between two of the 64 levels of a pixel's colour.
_STEP = 255 / 63

CREDITS = "Pictures: Noto Color Emoji, SIL Open Font License 1.1. Names and keywords: Unicode CLDR, Unicode License v3."

_FILES = Path(__file__).parent / "emoji_files"


def _check(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")


@functools.lru_cache(maxsize=1)
def _index() -> dict[str, Any]:
    return json.loads((_FILES / "index.json").read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=len(SPLITS))
def _table(split: str) -> list[tuple[str, str, str]]:
    """Return id, name and keywords of each picture."""
    _check(split)
    lines = split_path(_FILES, split, "names.tsv").read_text(encoding="utf-8").rstrip("\n").split("\n")
    rows = [line.split("\t") for line in lines]
    return [(picture_id, name, keywords) for picture_id, name, keywords in rows]


@functools.lru_cache(maxsize=len(SPLITS))
def pictures(split: str) -> npt.NDArray[np.uint8]:
    """Return the pictures of a split, (n, 72, 72, 3) uint8 RGB, read-only. The first call decodes them."""
    names_of_split, index = names(split), _index()
    rows, columns = index["rows"], index["columns"]
    cells = []
    for number in range(-(-len(names_of_split) // (rows * columns))):
        with Image.open(split_path(_FILES, split, f"{number}.webp")) as sheet:
            pixels = np.asarray(sheet.convert("RGB"))
        grid = pixels.reshape(-1, SIZE, columns, SIZE, 3).transpose(0, 2, 1, 3, 4)
        cells.append(grid.reshape(-1, SIZE, SIZE, 3))
    # The sheets contain the pictures in the order of their names, which compresses best.
    order = sorted(range(len(names_of_split)), key=names_of_split.__getitem__)
    result = np.empty((len(order), SIZE, SIZE, 3), dtype=np.uint8)
    result[order] = np.concatenate(cells)[: len(order)]
    result.flags.writeable = False
    return result


def names(split: str) -> list[str]:
    """Return the English names of a split's pictures in Unicode CLDR, such as "man cook: dark skin tone"."""
    return [name for _, name, _ in _table(split)]


def image_ids(split: str) -> list[str]:
    """Return the code points of each picture in hexadecimal, such as "1f468_1f3ff_200d_1f373"."""
    return [picture_id for picture_id, _, _ in _table(split)]


def captions(split: str) -> list[str]:
    """Return five captions per picture: caption j belongs to picture j // 5."""
    _check(split)
    return read_captions(split_path(_FILES, split, "caps.txt"))


def patches(images: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Turn pictures (n, 72, 72, 3) uint8 into regions (n, 36, 432) float32.

    Region 6 r + c is the patch of 12 x 12 pixels in row r and column c. Its 432 values are the red, green and blue
    values of its pixels, row by row, normalised as (value - MEAN) / STD. They have zero mean and unit variance over the
    training pictures, so the white background does not dominate.
    """
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[1:] != (SIZE, SIZE, 3) or images.dtype != np.uint8:
        raise ValueError(f"images: expected uint8 of shape (n, {SIZE}, {SIZE}, 3), got {images.dtype} {images.shape}")
    grid = images.reshape(-1, GRID, PATCH, GRID, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
    values = (grid.astype(np.float32) - np.float32(MEAN)) / np.float32(STD)
    return np.ascontiguousarray(values.reshape(-1, GRID * GRID, PATCH * PATCH * 3))


def pictures_of(features: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Invert `patches`: turn (n, 36, 432) floats into (n, 72, 72, 3) uint8, rounded and clipped to 0 to 255."""
    features = np.asarray(features)
    if features.ndim != 3 or features.shape[1:] != (GRID * GRID, PATCH * PATCH * 3):
        raise ValueError(f"features: expected shape (n, {GRID * GRID}, {PATCH * PATCH * 3}), got {features.shape}")
    values = np.rint(features * STD + MEAN).clip(0, 255).astype(np.uint8)
    grid = values.reshape(-1, GRID, GRID, PATCH, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
    return np.ascontiguousarray(grid.reshape(-1, SIZE, SIZE, 3))


def picture_if_patches(features: npt.NDArray[np.floating]) -> npt.NDArray[np.uint8] | None:
    """Return the picture (72, 72, 3) whose `patches` are the regions (k, f) of an image; None if there is none.

    Patches that a feature store rounded to half precision or bfloat16 are recognised, too.
    """
    if features.shape != (GRID * GRID, PATCH * PATCH * 3):
        return None
    picture = pictures_of(features[None])
    # Float16 stores a pixel to a thousandth of its range. Features of a detector are not near this grid.
    if np.allclose(patches(picture)[0], features, atol=2e-3):
        return picture[0]
    # Bfloat16 may change a dark pixel by one, so round to its nearest level.
    picture = np.rint(np.rint(picture / _STEP) * _STEP).astype(np.uint8)
    rounded = torch.from_numpy(patches(picture)[0]).to(torch.bfloat16).to(torch.float32)
    return picture[0] if np.array_equal(rounded.numpy(), features) else None


def is_bundled(picture: npt.NDArray[np.uint8]) -> bool:
    """Return whether `picture` (72, 72, 3) is one of the bundled emoji."""
    return any(bool((pictures(split) == picture).all(axis=(1, 2, 3)).any()) for split in SPLITS)


def picture_png(split: str, index: int) -> bytes:
    """Return the content of a PNG file of one picture."""
    images = pictures(split)
    if not 0 <= index < len(images):
        raise ValueError(f"index: expected 0 to {len(images) - 1} for the split {split!r}, got {index}")
    buffer = io.BytesIO()
    Image.fromarray(images[index]).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def vocabulary() -> Vocabulary:
    """Build the vocabulary of words that occur at least four times in the training captions."""
    return Vocabulary.build(captions("train"))


def load(split: str, words: Vocabulary | None = None) -> CaptionDataset:
    """Load a split into memory. `words` is the vocabulary; default: `vocabulary()`."""
    images, texts = pictures(split), captions(split)
    return CaptionDataset(
        patches(images),
        texts,
        np.arange(len(texts)) // CAPTIONS_PER_IMAGE,
        vocabulary() if words is None else words,
        image_ids=image_ids(split),
        name=f"emoji {split}",
    )


def write_dataset(directory: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write the published layout: `{split}_ims.npy`, `_caps.txt` and `_ids.txt` of each split, and `vocab.json`.

    The files take about 226 MB. Each is written atomically, unless it exists with the same content.

    Args:
        directory: the folder; created if missing.
        overwrite: replace files with other content.

    Returns:
        The folder.

    Raises:
        ValueError: a file has other content and `overwrite` is not set, the folder is a feature store, or it contains
            a `{split}_cap2im.txt`, which would assign captions to pictures of other data.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory}: expected a directory, found a file")
    refuse_store(directory)
    texts = {"vocab.json": vocabulary().to_json()}
    for split in SPLITS:
        stray = split_path(directory, split, "cap2im.txt")
        if regular.is_present(stray):
            raise ValueError(f"{stray}: belongs to other data; choose another directory")
        texts[f"{split}_caps.txt"] = "".join(f"{caption}\n" for caption in captions(split))
        texts[f"{split}_ids.txt"] = "".join(f"{picture_id}\n" for picture_id in image_ids(split))

    # Check all existing files before anything is written.
    needed = [name for name, text in texts.items() if not _holds(directory / name, text.encode("utf-8"))]
    needed += [f"{split}_ims.npy" for split in SPLITS if not _holds_patches(directory, split)]
    for name in needed:
        if (directory / name).exists() and not overwrite:
            raise ValueError(f"{directory / name}: exists with other content; choose another directory")
    for name in needed:
        if name in texts:
            atomic.write_text(directory / name, texts[name])
        else:
            with atomic.atomic_file(directory / name) as file:
                np.save(file, patches(pictures(name.removesuffix("_ims.npy"))))
    return directory


def write_pictures(directory: str | os.PathLike[str]) -> Path:
    """Write the pictures as PNG files and `captions.csv`, which `itm-fast data import` reads.

    Args:
        directory: a new or empty folder; created if missing. The pictures are in its folder `pictures`.

    Returns:
        The folder.

    Raises:
        ValueError: the folder is not empty, or is a file.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory}: expected a new or empty folder")
    atomic.make_folder(directory / "pictures")
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("image", "caption", "split"))
    for split in SPLITS:
        texts = captions(split)
        for number, picture_id in enumerate(image_ids(split)):
            (directory / "pictures" / f"{picture_id}.png").write_bytes(picture_png(split, number))
            own = texts[number * CAPTIONS_PER_IMAGE : (number + 1) * CAPTIONS_PER_IMAGE]
            writer.writerows((f"{picture_id}.png", text, split) for text in own)
    atomic.write_text(directory / "captions.csv", table.getvalue())
    return directory


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def _holds_patches(directory: Path, split: str) -> bool:
    try:
        stored = open_features(split_path(directory, split, "ims.npy"))
    except (ValueError, OSError):
        return False
    return stored.dtype == np.float32 and np.array_equal(stored, patches(pictures(split)))
