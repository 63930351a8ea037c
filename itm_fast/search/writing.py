"""Change an index: one writer at a time, new files first, then the manifest in one step, then old files are removed.

Inside: `locked`, `check_content`, `check_folder`, `commit`, `Builder`, `compacted`, `remove_strays`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from itm_fast.files import atomic, lock
from itm_fast.files.messages import shown
from itm_fast.search.manifest import MANIFEST, SIDES, Manifest, SegmentRecord, is_index, write_manifest
from itm_fast.search.members import Encodings
from itm_fast.search.pooling import Pooling
from itm_fast.search.results import Item
from itm_fast.search.segments import Segment, Stored, joined_parts, packed, write_segment

__all__ = ["Builder", "check_content", "check_folder", "commit", "compacted", "locked", "remove_strays"]

LOCK = "lock"
# A segment that reaches this size is complete.
SEGMENT_BYTES = 128 * 2**20
# The names of segments and poolings, and of the temporary files of killed writers.
_HEX = "[0-9a-f]" * 8
_OWN = [f"{kind}-{_HEX}.safetensors" for kind in (*SIDES, "pooling")]
_TEMPORARY = [f".index.{_HEX}.tmp.json"]
_TEMPORARY += [f".{kind}-{_HEX}.{_HEX}.tmp.safetensors" for kind in (*SIDES, "pooling")]


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of an index.

    Raises:
        ValueError: another process changes the index; the message names the process.
    """
    with lock.hold(
        directory / LOCK,
        directory,
        refusal=lambda holder: f"{directory}: {holder} is changing this index; try again when it has finished",
        warning=lambda reason: f"{directory}: the file system has no locks ({reason}); keep to one writer at a time",
    ):
        yield


def check_folder(directory: Path) -> None:
    """Raise ValueError if a folder cannot be written, or is no index and holds more than what a killed build left."""
    atomic.check_folder(directory, directory)
    if not directory.exists() or is_index(directory):
        return
    if not directory.is_dir():
        raise ValueError(f"{directory}: expected a folder, found a file")
    check_content(directory)


def check_content(directory: Path) -> None:
    """Raise ValueError if a folder holds a file that is not one of an index."""
    with atomic.open_folder(directory) as folder:
        own = {name for pattern in (*_OWN, *_TEMPORARY, LOCK, MANIFEST) for name in folder.names(pattern)}
        others = [name for name in folder.names("*") if name not in own]
    if others:
        raise ValueError(f"{directory}: expected a new or empty folder, found {shown(others[0])}")


def remove_strays(directory: Path, kept: set[str]) -> None:
    """Remove files that killed writers left, and files that no longer belong to the index. Call it under the lock."""
    with atomic.open_folder(directory) as folder:
        for name in {name for pattern in (*_OWN, *_TEMPORARY) for name in folder.names(pattern)} - kept:
            folder.remove(name)


def commit(directory: Path, manifest: Manifest) -> None:
    """Make a manifest the state of the index, then remove what it does not name. Call it under the lock."""
    write_manifest(directory, manifest)
    remove_strays(directory, manifest.files())


class Builder:
    """Collect items, and write a segment whenever enough are collected.

    Args:
        directory: the index.
        pooling: makes the pooled vectors.
        dtype: the type of the stored rows.
    """

    def __init__(self, directory: Path, pooling: Pooling, dtype: str) -> None:
        self._directory, self._pooling, self._dtype = directory, pooling, dtype
        self._parts: dict[str, list[Stored]] = {side: [] for side in SIDES}
        self._bytes = dict.fromkeys(SIDES, 0)
        self.records: list[SegmentRecord] = []

    def add(self, side: str, items: Sequence[Item], thumbnails: Sequence[bytes], encodings: Encodings) -> None:
        if self._dtype == "int8" and all(isinstance(one, Tensor) for one in encodings):
            raise ValueError("dtype: int8 is for models with several vectors per item; expected bf16 with this one")
        pooled = self._pooling(side, encodings)
        if not bool(pooled.isfinite().all()):
            number = int((~pooled.isfinite().all(1)).nonzero()[0, 0])
            raise ValueError(f"{items[number].id}: the model gives an embedding that is not finite")
        self.add_stored(side, packed(items, thumbnails, encodings, pooled, self._dtype))

    def add_stored(self, side: str, stored: Stored) -> None:
        """Add items as segments store them."""
        if not len(stored["pooled"]):
            return
        self._parts[side].append(stored)
        self._bytes[side] += _size(stored)
        if self._bytes[side] >= SEGMENT_BYTES:
            self.flush(side)

    def flush(self, side: str) -> None:
        """Write what is collected of a side."""
        if self._parts[side]:
            self.records.append(write_segment(self._directory, side, joined_parts(self._parts[side])))
            self._parts[side], self._bytes[side] = [], 0

    def pending(self, side: str) -> int:
        """Return the number of items of a side that are not written yet."""
        return sum(len(part["pooled"]) for part in self._parts[side])

    def take_small(self, side: str, records: Sequence[SegmentRecord], members: int) -> list[SegmentRecord]:
        """Join small segments at the end of `records` with the collected items; return the records that remain.

        A segment is joined if it has at most twice the items behind it. So an index of n items has about log n
        segments that are not complete, and an item is written again about log n times.
        """
        kept = list(records)
        taken: list[Stored] = []
        count, size = self.pending(side), self._bytes[side]
        while count and kept and kept[-1].items <= 2 * count and kept[-1].bytes + size < SEGMENT_BYTES:
            record = kept.pop()
            taken.insert(0, Segment(self._directory, record, members).kept())
            count, size = count + record.items, size + record.bytes
        taken = [one for one in taken if len(one["pooled"])]
        self._parts[side][:0] = taken
        self._bytes[side] += sum(map(_size, taken))
        return kept


def compacted(directory: Path, manifest: Manifest) -> list[SegmentRecord]:
    """Write the items that are not deleted into few segments; return the records of the new state.

    A complete segment without deleted items stays as it is, and so does a single one that is not complete. Memory holds
    one segment at a time.
    """
    members = len(manifest.models)
    builder = Builder(directory, Pooling([None] * members), manifest.dtype)
    for side in SIDES:
        own = [one for one in manifest.segments if one.side == side]
        unfinished = [one for one in own if one.deleted or one.bytes < SEGMENT_BYTES]
        if len(unfinished) <= 1 and not any(one.deleted for one in unfinished):
            builder.records += own
            continue
        for record in own:
            if not record.deleted and record.bytes >= SEGMENT_BYTES and not builder.pending(side):
                builder.records.append(record)
            else:
                builder.add_stored(side, Segment(directory, record, members).kept())
        builder.flush(side)
    return builder.records


def _size(stored: Stored) -> int:
    return sum(tensor.nbytes for tensor in stored.values())
