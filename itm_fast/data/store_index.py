"""Check the index of a feature store against its manifest before anything uses it.

Inside: `check_index`, `check_token_ids`, `check_captions`, `texts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from itm_fast.data.boxes import RULE, are_boxes
from itm_fast.data.vocabulary import Vocabulary
from itm_fast.files.messages import shown

__all__ = ["check_captions", "check_index", "check_token_ids", "texts"]

_DTYPES = {"token_ids": "int32", "text": "uint8", "ids": "uint8", "tags": "uint8"}  # All other arrays are int64.
# Arrays of lengths, and the arrays whose parts they delimit.
_PARTS = {"caption_lengths": "token_ids", "text_lengths": "text", "ids_lengths": "ids", "tags_lengths": "tags"}


class Split(Protocol):
    """What the manifest of a store records of a split."""

    @property
    def images(self) -> int: ...

    @property
    def captions(self) -> int: ...

    @property
    def regions(self) -> int: ...

    @property
    def ragged(self) -> bool: ...

    @property
    def shards(self) -> Any: ...


def check_index(path: Path, arrays: Mapping[str, np.ndarray], split: Split) -> None:
    """Check the types, shapes, values and sums of the arrays in an index.

    Args:
        path: the file, for messages.
        arrays: its content.
        split: the split's record in the manifest.

    Raises:
        ValueError: an array is missing, or does not fit the manifest or the other arrays.
    """
    sizes: dict[str, int | None] = {"token_ids": None, "text": None}
    sizes |= dict.fromkeys(("caption_lengths", "caption_image", "text_lengths"), split.captions)
    for name in ("ids", "tags"):
        if name in arrays or f"{name}_lengths" in arrays:
            sizes |= {name: None, f"{name}_lengths": split.images}
    if split.ragged:
        sizes["region_counts"] = split.images
    elif "region_counts" in arrays:
        raise ValueError(f"{path}: region_counts: expected no such array, as each image has {split.regions} regions")
    for name, size in sizes.items():
        _check_type(path, name, arrays.get(name), size)
    limits = {"token_ids": (0, 2**31 - 1), "caption_image": (0, split.images - 1), "region_counts": (1, split.regions)}
    # A caption has at least <end>.
    limits |= {name: (int(name == "caption_lengths"), len(arrays.get(whole, ()))) for name, whole in _PARTS.items()}
    for name in filter(limits.__contains__, sizes):
        least, most = limits[name]
        if len(array := arrays[name]) and not (least <= array.min() and array.max() <= most):
            found = f"{array.min()} to {array.max()}"
            raise ValueError(f"{path}: {name}: expected values from {least} to {most}, got {found}")
    for name in filter(_PARTS.__contains__, sizes):
        total, whole = int(arrays[name].sum()), len(arrays[_PARTS[name]])
        if total != whole:
            raise ValueError(f"{path}: {name}: expected a sum of {whole}, the length of {_PARTS[name]}, got {total}")
    for name in filter({"text", "ids", "tags"}.__contains__, sizes):
        _check_text(path, name, arrays[name], arrays[f"{name}_lengths"])
    if split.ragged:
        _check_regions(path, arrays["region_counts"], split)
    if "boxes" in arrays:
        _check_boxes(path, arrays["boxes"], sum(shard.regions for shard in split.shards))


def check_token_ids(path: Path, arrays: Mapping[str, np.ndarray], vocabulary: Vocabulary) -> None:
    """Check that the token ids of a checked index are those of captions in a vocabulary.

    Raises:
        ValueError: an id is not in the vocabulary, or a caption has not the marks of the vocabulary, such as `<start>`
            and `<end>`.
    """
    token_ids, ends = arrays["token_ids"], np.cumsum(arrays["caption_lengths"])
    if len(token_ids) and (largest := token_ids.max()) >= len(vocabulary):
        raise ValueError(f"{path}: token_ids: expected values from 0 to {len(vocabulary) - 1}, got {largest}")
    starts = ends - arrays["caption_lengths"]
    wrong, expected = token_ids[ends - 1] != vocabulary.end, f"end with {vocabulary.words[vocabulary.end]}"
    if vocabulary.marks[0]:
        wrong |= (token_ids[starts] != vocabulary.start) | (starts == ends - 1)
        expected = f"begin with {vocabulary.words[vocabulary.start]} and {expected}"
    if wrong.any():
        raise ValueError(f"{path}: caption_lengths: caption {np.flatnonzero(wrong)[0]} does not {expected}")


def check_captions(path: Path, arrays: Mapping[str, np.ndarray], vocabulary: Vocabulary) -> None:
    """Check that the token ids of a checked index are those of the captions' texts. Takes as long as tokenising them.

    Raises:
        ValueError: a caption has other token ids than its text.
    """
    starts = [0, *np.cumsum(arrays["caption_lengths"]).tolist()]
    for number, text in enumerate(texts(arrays, "text")):
        found = arrays["token_ids"][starts[number] : starts[number + 1]].tolist()
        if found != vocabulary.encode(text):
            raise ValueError(f"{path}: token_ids: those of caption {number} are not those of its text, {shown(text)}")


def texts(arrays: Mapping[str, np.ndarray], name: str) -> list[str]:
    """Return the texts `name` of a checked index: "text", the captions, "ids", the names of images, or "tags"."""
    content, ends = arrays[name].tobytes(), np.cumsum(arrays[f"{name}_lengths"]).tolist()
    return [content[start:end].decode() for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _check_type(path: Path, name: str, array: np.ndarray | None, size: int | None) -> None:
    dtype = _DTYPES.get(name, "int64")
    if array is None or array.dtype != dtype or array.ndim != 1 or size not in (None, len(array)):
        expected = "one dimension" if size is None else f"shape ({size},)"
        found = "none" if array is None else f"{array.dtype} of shape {array.shape}"
        raise ValueError(f"{path}: {name}: expected {dtype} of {expected}, got {found}")


def _check_text(path: Path, name: str, text: np.ndarray, lengths: np.ndarray) -> None:
    try:
        text.tobytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {name}: not UTF-8 (byte {error.start}: {error.reason})") from None
    starts = (np.cumsum(lengths) - lengths)[lengths > 0]
    # Bytes 10xxxxxx continue a character.
    inside = np.flatnonzero(text[starts] & 0xC0 == 0x80)
    if len(inside):
        raise ValueError(f"{path}: {name}_lengths: they cut the character at byte {starts[inside[0]]} of {name}")


def _check_regions(path: Path, counts: np.ndarray, split: Split) -> None:
    ends = np.cumsum([0, *(shard.images for shard in split.shards)])
    for shard, regions in zip(split.shards, np.add.reduceat(counts, ends[:-1]).tolist(), strict=True):
        if regions != shard.regions:
            raise ValueError(f"{path}: region_counts: {shard.file} holds {shard.regions} regions, its counts {regions}")


def _check_boxes(path: Path, boxes: np.ndarray, regions: int) -> None:
    if boxes.dtype != np.float32 or boxes.shape != (regions, 4):
        raise ValueError(f"{path}: boxes: expected float32 of shape {(regions, 4)}, got {boxes.dtype} {boxes.shape}")
    wrong = np.flatnonzero(~are_boxes(boxes))
    if len(wrong):
        found = ", ".join(f"{value:g}" for value in boxes[wrong[0]])
        raise ValueError(f"{path}: boxes: row {wrong[0]}: expected (x0, y0, x1, y1) with {RULE}, got ({found})")
