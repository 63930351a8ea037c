"""Write random data of COCO's size, to rehearse long runs without COCO.

Inside: `write_synthetic`, `COCO_IMAGES`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from itm_fast.data.layout import CAPTIONS_PER_IMAGE, SUFFIXES, split_path
from itm_fast.data.store_format import refuse_store
from itm_fast.data.vocabulary import END, MASK, PAD, START, UNK, Vocabulary
from itm_fast.files import atomic

__all__ = ["COCO_IMAGES", "write_synthetic"]

# The published splits, with five captions per image. The images of test are the first of testall.
COCO_IMAGES: Mapping[str, int] = {"train": 113_287, "dev": 5_000, "testall": 5_000, "test": 1_000}
COCO_WORDS = 11_755  # in the vocabulary published with SCAN, <pad>, <start>, <end> and <unk> among them
_BLOCK_IMAGES = 64
# In a sparse file, only the first bytes of each image contain numbers. With the file header of 128 bytes, an image of
# COCO's size takes one page of 4096 bytes.
_SPARSE_BYTES = 3968


def write_synthetic(
    directory: str | os.PathLike[str],
    *,
    scale: float = 1.0,
    regions: int = 36,
    width: int = 2048,
    words: int = COCO_WORDS,
    seed: int = 0,
    sparse: bool = False,
    progress: bool = False,
) -> Path:
    """Write random data with COCO's counts, caption lengths and vocabulary size in the published layout.

    Captions have 6 to 22 words, 11 on average (8 to 24 and 13 with `<start>` and `<end>`). Word frequencies fall with
    rank as in language (Zipf). Features are not negative, like those of a detector. Equal arguments give equal files.
    Each file is written atomically.

    Args:
        directory: the folder; files with the same names are replaced.
        scale: the fraction of COCO's images in each split.
        regions: regions per image.
        width: features per region.
        words: words of the vocabulary, including special words.
        seed: the random seed.
        sparse: leave most of each image zero. The zeros take no space on file systems that store files sparsely.
        progress: show a progress bar on a terminal.

    Returns:
        The folder.

    Raises:
        ValueError: an argument is out of range, or the folder is a feature store.
        OSError: the disk is full.
    """
    for name, value, least in (("regions", regions, 1), ("width", width, 1), ("words", words, 6), ("seed", seed, 0)):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    if not 0 < scale <= 100:
        raise ValueError(f"scale: expected a number above 0 and at most 100, got {scale}")
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder, found a file")
    refuse_store(folder)
    vocabulary = Vocabulary([PAD, START, END, UNK, MASK, *(f"word{number}" for number in range(words - 5))])
    vocabulary.save(folder / "vocab.json")
    counts = {split: max(round(images * scale), 1) for split, images in COCO_IMAGES.items()}
    row_bytes = 4 * regions * width
    total = sum(counts.values()) * row_bytes
    with tqdm(total=total, unit="B", unit_scale=True, disable=None if progress else True) as bar:
        for split, images in counts.items():
            bar.set_description_str(split)
            # The images of test are the first of testall, as in COCO.
            source = "testall" if split == "test" else split
            # Optional files of other data would describe images that no longer exist.
            for suffix in SUFFIXES[2:]:
                split_path(folder, split, suffix).unlink(missing_ok=True)
            stream = [seed, *source.encode()]
            blocks = (_captions(stream, first, words - 5) for first in range(0, images, _BLOCK_IMAGES))
            captions = [caption for block in blocks for caption in block][: images * CAPTIONS_PER_IMAGE]
            atomic.write_text(split_path(folder, split, "caps.txt"), "".join(captions))
            with atomic.atomic_file(split_path(folder, split, "ims.npy")) as file:
                _write_features(file, (images, regions, width), stream, sparse, bar)
    return folder


def _captions(stream: list[int], first: int, words: int) -> list[str]:
    """Return the caption lines of a whole block of images, so that they do not depend on the number of images."""
    random = np.random.default_rng([*stream, 1, first])
    # A gamma distribution, rounded and clipped, has COCO's mean and long tail.
    drawn = random.gamma(5.0, 1.0, _BLOCK_IMAGES * CAPTIONS_PER_IMAGE)
    lengths = np.clip(np.rint(6 + drawn), 6, 22).astype(np.int64)
    frequencies = 1 / (np.arange(words) + 2.7)
    chosen = random.choice(words, size=int(lengths.sum()), p=frequencies / frequencies.sum())
    ends = np.cumsum(lengths).tolist()
    texts = [f"word{number}" for number in chosen.tolist()]
    return [" ".join(texts[end - length : end]) + "\n" for end, length in zip(ends, lengths.tolist(), strict=True)]


def _write_features(file: IO[bytes], shape: tuple[int, int, int], stream: list[int], sparse: bool, bar: Any) -> None:
    images, regions, width = shape
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    start, row_bytes = file.tell(), 4 * regions * width
    drawn = min(_SPARSE_BYTES // 4, regions * width) if sparse else regions * width
    for first in range(0, images, _BLOCK_IMAGES):
        count = min(_BLOCK_IMAGES, images - first)
        random = np.random.default_rng([*stream, 2, first])
        values = np.abs(random.standard_normal((_BLOCK_IMAGES, drawn), dtype=np.float32))[:count]
        if sparse:
            for number, row in enumerate(values):
                file.seek(start + (first + number) * row_bytes)
                file.write(row.tobytes())
        else:
            file.write(values.tobytes())
        bar.update(count * row_bytes)
    file.truncate(start + images * row_bytes)
