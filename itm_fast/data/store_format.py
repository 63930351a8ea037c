"""The files of a feature store, its manifest, and the checks when a store is opened.

Inside: `Manifest`, `SplitRecord`, `ShardRecord`, `DTYPES`, `PICTURES`, `is_store`, `check_finished`, `read_manifest`,
`write_manifest`, `check_types`, `shard_header`, `check_shard`, `read_index`, `vocabulary_digest`.

STORE/store.json                     the manifest, written last: a folder without it is not a store
STORE/vocab.json                     the vocabulary of the token ids
STORE/{split}-index.safetensors      captions (text, token ids, image); names, region counts, boxes and tags of images
STORE/{split}-00000.safetensors ...  "features": the regions (N, f) of consecutive images, or pictures (picture_shards)
STORE/pictures/                      optional: a store of the pictures that the features were computed from
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from itm_fast.data.store_index import check_index
from itm_fast.data.vocabulary import Vocabulary
from itm_fast.files import atomic, documents, regular
from itm_fast.files.formats import Format
from itm_fast.files.messages import shown

FORMAT = Format()
MANIFEST = "store.json"
UNFINISHED = "unfinished.json"
LOCK = "packing.lock"
# In an unfinished store: regions that were detected in pictures, until they are packed.
DETECTIONS = "detections"
VOCABULARY = "vocab.json"
# In a feature store: a store of the pictures that the features were computed from.
PICTURES_FOLDER = "pictures"
# The longer side of these pictures if regions have boxes, in pixels.
BOXED_SIDE = 336
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Formats of pictures, which a store may hold instead of features; the names that Pillow has for them.
PICTURES = {"jpeg": "JPEG", "webp": "WEBP"}
_SAFETENSORS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_MAX_MANIFEST_BYTES = 16 * 2**20
# More shards would not fit into the manifest or into the notes of an unfinished store.
MOST_SHARDS = 2**16
# Sizes of models may depend on it, but no file of a ragged split does.
MOST_REGIONS = 2**16
_MOST_PIXELS_PER_SIDE = 4096
_NAME = re.compile(r"(?!\.{1,2}$)[^/\\\0]{1,200}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@attrs.frozen
class ShardRecord:
    """A file of features: its number of images, their total number of regions, and the SHA-256 of the whole file."""

    file: str
    images: int
    regions: int
    bytes: int
    sha256: str


@attrs.frozen
class SplitRecord:
    """A split.

    Attributes:
        name: the split, such as "train".
        images, captions: their numbers.
        regions: the maximum number of regions per image.
        ragged: whether images may have fewer regions.
        width: the features per region.
        index, index_bytes, index_sha256: the index file.
        source_dtype: the type of the packed features file.
        features: the digest of that file, as runs record it.
        repeated: how often that file stored each image.
        shards: the files of features.
    """

    name: str
    images: int
    captions: int
    regions: int
    ragged: bool
    width: int
    index: str
    index_bytes: int
    index_sha256: str
    source_dtype: str
    features: str
    repeated: int
    shards: tuple[ShardRecord, ...]


@attrs.frozen
class Manifest:
    """The content of a store.

    Attributes:
        dtype: the type of the features, or the format of the pictures.
        vocabulary: the digest of the vocabulary.
        splits: the splits.
        stretched: the pictures were scaled to squares, whatever their proportions; otherwise the centre was cropped.
        encoder: the vision model that made the features, as `PictureEncoder.kind`; "" if there was none.
    """

    dtype: str
    vocabulary: str
    splits: tuple[SplitRecord, ...]
    stretched: bool = False
    encoder: str = ""

    def split(self, name: str) -> SplitRecord | None:
        return next((split for split in self.splits if split.name == name), None)


def is_store(directory: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a finished feature store."""
    return regular.is_present(Path(directory) / MANIFEST)


def check_finished(directory: str | os.PathLike[str]) -> None:
    """Raise ValueError if a folder is a feature store that is not finished."""
    folder = Path(directory)
    # A data folder may contain a folder of this name with other files, such as those of a detector.
    detected = any((folder / DETECTIONS).glob("*.safetensors"))
    if not is_store(folder) and (regular.is_present(folder / UNFINISHED) or detected):
        raise ValueError(f"{directory}: an unfinished store; finish it with the same itm-fast data command")


def refuse_store(directory: str | os.PathLike[str]) -> None:
    """Raise ValueError if a folder is a feature store, finished or not: files of other data would damage it."""
    check_finished(directory)
    if is_store(directory):
        raise ValueError(f"{directory}: a feature store; choose another folder")


def vocabulary_digest(vocabulary: Vocabulary) -> str:
    """Return the SHA-256 of a vocabulary: its kind, settings and words."""
    return hashlib.sha256(vocabulary.to_json().encode()).hexdigest()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    content = {"format_version": FORMAT.newest, **attrs.asdict(manifest)}
    for name in ("stretched", "encoder"):  # Earlier versions, which do not know them, read stores without them.
        if not content[name]:
            del content[name]
    atomic.write_text(directory / MANIFEST, json.dumps(content, indent=1) + "\n")


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a store.

    Raises:
        ValueError: the file is missing, damaged, or of a newer version. The message names it.
    """
    path = Path(directory) / MANIFEST
    if not regular.is_file(path):
        raise ValueError(f"{path}: no such file, so {directory} is not a finished feature store")
    content = documents.read_json(path, _MAX_MANIFEST_BYTES, "the manifest of a feature store")
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected the manifest of a feature store, got {shown(content)}")
    content = FORMAT.upgrade(content, path)
    content.pop("format_version")
    try:
        splits = tuple(
            SplitRecord(**{**split, "shards": tuple(ShardRecord(**shard) for shard in split["shards"])})
            for split in content["splits"]
        )
        manifest = Manifest(**{**content, "splits": splits})
        _check_manifest(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not a readable manifest of a feature store ({error!r:.100})") from None
    return manifest


def check_types(record: Manifest | SplitRecord | ShardRecord) -> None:
    """Raise ValueError if a field of a record has a wrong type, or is no possible file size. The message names it."""
    kinds: dict[str, Any] = {"int": int, "str": str, "bool": bool}
    for field in attrs.fields(type(record)):
        value: Any = getattr(record, field.name)
        kind = kinds.get(str(field.type), type(value))
        if type(value) is not kind or (kind is int and not 0 <= value < 2**53):
            raise ValueError(f"{field.name}: {shown(value)}")


def _check_manifest(manifest: Manifest) -> None:
    """Check types and sums of a manifest before anything relies on them."""
    shards = [shard for split in manifest.splits for shard in split.shards]
    records: list[Manifest | SplitRecord | ShardRecord] = [manifest, *manifest.splits, *shards]
    for record in records:
        check_types(record)
    if manifest.dtype not in {**DTYPES, **PICTURES}:
        raise ValueError(f"dtype: {shown(manifest.dtype)}")
    if len({split.name for split in manifest.splits}) < len(manifest.splits):
        raise ValueError("splits: a name occurs twice")
    for split in manifest.splits:
        names = [split.name, split.index, *(shard.file for shard in split.shards)]
        if not all(_NAME.fullmatch(name) for name in names) or not _DIGEST.fullmatch(split.index_sha256):
            raise ValueError(f"{split.name}: its name, names of files or digests")
        images = sum(shard.images for shard in split.shards)
        regions, full = sum(shard.regions for shard in split.shards), split.images * split.regions
        if not images or images != split.images or not (regions == full or (split.ragged and regions < full)):
            raise ValueError(f"{split.name}: images of the shards")
        if not split.width or not split.captions or split.regions > MOST_REGIONS:
            raise ValueError(f"{split.name}: its width, captions or regions per image")
        grid, patch = math.isqrt(split.regions), math.isqrt(split.width // 3)
        if manifest.dtype in PICTURES:
            if split.ragged or (grid * grid, 3 * patch * patch) != (split.regions, split.width):
                raise ValueError(f"{split.name}: expected square pictures of square patches")
            if grid * patch > _MOST_PIXELS_PER_SIDE:
                raise ValueError(f"{split.name}: pictures of {grid * patch:,} pixels per side")
            if any(not 1 <= shard.images <= shard.bytes for shard in split.shards):
                raise ValueError(f"{split.name}: images of the shards")
            continue
        for shard in split.shards:
            size = len(shard_header(manifest.dtype, shard.regions, split.width))
            size += shard.regions * split.width * DTYPES[manifest.dtype].itemsize
            if shard.bytes != size or not 1 <= shard.images <= shard.regions:
                raise ValueError(f"{shard.file}: its size")


def shard_header(dtype: str, regions: int, width: int) -> bytes:
    """Return the header of a shard, which its size and type determine. The numbers follow it."""
    size = regions * width * DTYPES[dtype].itemsize
    entry = {"dtype": _SAFETENSORS[dtype], "shape": [regions, width], "data_offsets": [0, size]}
    text = json.dumps({"features": entry}, separators=(",", ":")).encode()
    # Numbers start at a multiple of eight bytes, as in files that safetensors writes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_shard(path: Path, dtype: str, shard: ShardRecord, width: int) -> os.stat_result:
    """Check the size and header of a shard.

    Returns:
        The file's state.

    Raises:
        ValueError: the shard is missing, or differs from the manifest. The message names it.
    """
    # The header of a shard of pictures depends on the sizes of the pictures.
    header = b"" if dtype in PICTURES else shard_header(dtype, shard.regions, width)
    try:
        with regular.open_file(path) as file:
            status = os.fstat(file.fileno())
            found = file.read(len(header))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; the store needs it for {shard.images} images") from None
    if status.st_size < shard.bytes:
        raise ValueError(f"{path}: truncated: the store wrote {shard.bytes:,} bytes, the file has {status.st_size:,}")
    if status.st_size != shard.bytes or found != header:
        raise ValueError(f"{path}: not the shard that the store wrote: its size or its header differs")
    return status


def read_index(path: Path, split: SplitRecord) -> dict[str, np.ndarray]:
    """Read and check the arrays of a split's index.

    Raises:
        ValueError: the file is missing or damaged, or its arrays do not fit the manifest. The message names it.
    """
    if not regular.is_file(path):
        raise ValueError(f"{path}: no such file")
    size = path.stat().st_size
    if size != split.index_bytes:
        raise ValueError(f"{path}: the store wrote {split.index_bytes:,} bytes, the file has {size:,}")
    content = regular.read_bytes(path)
    if hashlib.sha256(content).hexdigest() != split.index_sha256:
        raise ValueError(f"{path}: damaged: its checksum is not that of the store")
    try:
        arrays: dict[str, np.ndarray] = load_tensors(content)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:  # The others: a type that numpy does not have.
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from None
    check_index(path, arrays, split)
    return arrays
