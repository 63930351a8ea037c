"""The manifest of an index: the only file that changes, replaced in one step.

Inside: `Manifest`, `SegmentRecord`, `read_manifest`, `write_manifest`, `check_texts`, `is_index`.

INDEX/index.json                        the manifest, written last; a folder without it is not an index
INDEX/{side}-XXXXXXXX.safetensors       a segment: items of one side, "images" or "captions"; never changed
INDEX/pooling-XXXXXXXX.safetensors      weights of a learned pooling
INDEX/lock                              held by the process that changes the index
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from itm_fast.files import atomic, documents, regular
from itm_fast.files.formats import Format
from itm_fast.files.messages import printable, shown

__all__ = [
    "MANIFEST",
    "SIDES",
    "FileRecord",
    "Manifest",
    "SegmentRecord",
    "check_texts",
    "is_index",
    "read_manifest",
    "write_manifest",
]

FORMAT = Format()
MANIFEST = "index.json"
SIDES = ("images", "captions")
ROW_TYPES = ("bf16", "int8")
POOLINGS = ("mean", "learned")
_MAX_BYTES = 64 * 2**20
_MOST_ITEMS = 2**31
_FILE = re.compile(r"(images|captions|pooling)-[0-9a-f]{8}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Python reads a byte of a path that is not UTF-8 as one of these.
_SURROGATE = re.compile("[\ud800-\udfff]")


@attrs.frozen
class FileRecord:
    """A file of the index: its name, its size, and the SHA-256 of its content."""

    file: str
    bytes: int
    sha256: str


@attrs.frozen
class SegmentRecord:
    """A segment.

    Attributes:
        file, bytes, sha256: as in `FileRecord`.
        side: "images" or "captions".
        items: number of items, deleted ones included.
        deleted: one bit per item, base64 of the bytes; empty if no item is deleted.
    """

    file: str
    bytes: int
    sha256: str
    side: str
    items: int
    deleted: str = ""

    def live(self) -> np.ndarray:
        """Return which items are not deleted, bool (items,)."""
        if not self.deleted:
            return np.ones(self.items, dtype=bool)
        bits = np.frombuffer(base64.b64decode(self.deleted), dtype=np.uint8)
        return ~np.unpackbits(bits, count=self.items).astype(bool)

    def with_live(self, live: np.ndarray) -> SegmentRecord:
        """Return this record with the items that are not in `live`, bool (items,), deleted."""
        bits = np.packbits(~live).tobytes()
        return attrs.evolve(self, deleted="" if live.all() else base64.b64encode(bits).decode())


@attrs.frozen
class Manifest:
    """The content of an index.

    Attributes:
        generation: the number of changes so far.
        models: the fingerprint of each model; several models are an ensemble.
        checkpoints: the run directory of each model; empty if the index was built from models in memory.
        dtype: the type of the stored rows, "bf16" or "int8".
        pooling: how a set of rows becomes one vector, "mean" or "learned".
        weights: the file of a learned pooling, or None.
        pictures: how a picture becomes features, as `pictures.kind_of` or `encoder_kind` returns it; "" if it cannot.
        candidates: number of items that the model scores per query.
        segments: the files of items, in the order of addition.
    """

    generation: int
    models: tuple[str, ...]
    checkpoints: tuple[str, ...]
    dtype: str
    pooling: str
    weights: FileRecord | None
    pictures: str
    candidates: int
    segments: tuple[SegmentRecord, ...]

    def files(self) -> set[str]:
        """Return the names of all files that belong to the index, besides the manifest and the lock."""
        return {one.file for one in self.segments} | ({self.weights.file} if self.weights else set())

    def revision(self) -> str:
        """Return a short digest of the content. Indexes of the same generation differ in it."""
        return _digest(attrs.asdict(self))[:16]


def is_index(directory: str | os.PathLike[str]) -> bool:
    """Return whether a folder is an index."""
    return regular.is_present(Path(directory) / MANIFEST)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_texts(checkpoints: Sequence[str], pictures: str) -> None:
    """Raise ValueError if a text of a manifest has a lone surrogate, which JSON files may not hold."""
    for name, text in (*(("checkpoint", one) for one in checkpoints), ("preprocessing", pictures)):
        if _SURROGATE.search(text):
            raise ValueError(f"{name}: {printable(text)}: an index cannot name a path that is not UTF-8; rename it")


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest of an index in one step; ValueError if it could not be read again."""
    content = {"format_version": FORMAT.newest, **attrs.asdict(manifest)}
    content = json.loads(json.dumps(content))
    text = json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n"
    _read(documents.parse_json(text), directory / MANIFEST)
    atomic.write_text(directory / MANIFEST, text)


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of an index.

    Raises:
        ValueError: the folder is no index, or the manifest is damaged or of a newer version. The message names it.
    """
    path = Path(directory) / MANIFEST
    if not regular.is_file(path):
        raise ValueError(f"{path}: no such file, so {directory} is not an index; itm-fast index build writes one")
    return _read(documents.read_json(path, _MAX_BYTES, "the manifest of an index"), path)


def _read(content: Any, path: Path) -> Manifest:
    """Return the manifest in a JSON value; ValueError as `read_manifest`."""
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected the manifest of an index, got {shown(content)}")
    digest = content.pop("digest", None)
    version_checked = FORMAT.upgrade(content, path)
    if digest != _digest(content):
        raise ValueError(f"{path}: damaged: its content does not match its checksum")
    version_checked.pop("format_version")
    try:
        manifest = _parsed(version_checked)
        _check(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not a readable manifest of an index ({error!r:.100})") from None
    return manifest


def _parsed(content: dict[str, Any]) -> Manifest:
    weights = content["weights"]
    return Manifest(
        **{
            **content,
            "models": tuple(content["models"]),
            "checkpoints": tuple(content["checkpoints"]),
            "weights": None if weights is None else FileRecord(**weights),
            "segments": tuple(SegmentRecord(**segment) for segment in content["segments"]),
        }
    )


def _check(manifest: Manifest) -> None:
    """Check types and values before anything relies on them; ValueError names the first that is wrong."""
    for name, value in (("generation", manifest.generation), ("candidates", manifest.candidates)):
        if type(value) is not int or not 1 <= value < 2**53:
            raise ValueError(f"{name}: {shown(value)}")
    if not manifest.models or not all(isinstance(one, str) and _DIGEST.fullmatch(one) for one in manifest.models):
        raise ValueError(f"models: {shown(manifest.models)}")
    if not all(isinstance(one, str) for one in (*manifest.checkpoints, manifest.pictures)):
        raise ValueError("checkpoints or pictures: expected texts")
    if manifest.dtype not in ROW_TYPES or manifest.pooling not in POOLINGS:
        raise ValueError(f"dtype or pooling: {shown(manifest.dtype)}, {shown(manifest.pooling)}")
    records: list[Any] = [*manifest.segments, *([manifest.weights] if manifest.weights else [])]
    if len({one.file for one in records}) < len(records):
        raise ValueError("segments: a file occurs twice")
    for one in records:
        if not _FILE.fullmatch(one.file) or not _DIGEST.fullmatch(one.sha256):
            raise ValueError(f"file or digest: {shown(one.file)}")
        if type(one.bytes) is not int or not 0 < one.bytes < 2**53:
            raise ValueError(f"{one.file}: bytes")
    for segment in manifest.segments:
        if segment.side not in SIDES or type(segment.items) is not int or not 0 < segment.items < _MOST_ITEMS:
            raise ValueError(f"{segment.file}: side or items")
        if segment.deleted and len(base64.b64decode(segment.deleted)) != -(-segment.items // 8):
            raise ValueError(f"{segment.file}: deleted")
