"""Record the shards of an unfinished feature store, and check whether a folder may become a store.

Inside: `Notes`, `check_empty`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs

from itm_fast.data import store_format
from itm_fast.data.check_store import check_vocabulary
from itm_fast.data.store_format import MANIFEST, UNFINISHED, Manifest, ShardRecord
from itm_fast.files import atomic, documents, regular
from itm_fast.files.messages import shown

_MAX_NOTES_BYTES = 16 * 2**20

# The path of a file, and its size, modification time and inode; None if it was absent.
Source = tuple[Path, tuple[int, int, int] | None]


class Notes:
    """The finished shards of an unfinished store, by file.

    Args:
        folder: the store.
        asked: the settings and digests of the source, which must be equal to continue.
        sources: the features file of each split and its state. Digests of large files only cover samples, so shards of
            a file that has been written to since are packed again.
        kept: the name of a folder that an import has written there before.

    Raises:
        ValueError: the folder contains other files, or a store of other data or settings.
    """

    def __init__(
        self, folder: Path, asked: dict[str, Any], sources: Mapping[str, Source], *, kept: str | None = None
    ) -> None:
        self.path, self._asked, self._sources = folder / UNFINISHED, asked, sources
        self.finished: Manifest | None = None
        self.shards: dict[str, ShardRecord] = {}
        if store_format.is_store(folder):
            self.finished = store_format.read_manifest(folder)
            if not _is_of(self.finished, asked):
                raise ValueError(f"{folder}: contains a feature store of other data or settings; choose another --out")
            _check_files(folder, self.finished)
            self.path.unlink(missing_ok=True)
            return
        if regular.is_present(self.path):
            self._take_up(folder)
        else:
            check_empty(folder, kept)
        for name in (MANIFEST, UNFINISHED, store_format.VOCABULARY):
            atomic.remove_temporaries(folder / name)
        # Written before the first shard, so that a folder with shards of an interrupted call is recognised.
        self._write()

    def _take_up(self, folder: Path) -> None:
        try:
            content = documents.read_json(self.path, _MAX_NOTES_BYTES)
            same = content["asked"] == self._asked
            records = [ShardRecord(**shard) for shard in content["shards"]]
            for record in records:
                store_format.check_types(record)
            before = {str(split): tuple(state) for split, state in content.get("sources", {}).items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(f"{self.path}: damaged; remove {folder} or choose another --out") from None
        if not same:
            raise ValueError(
                f"{folder}: contains an unfinished store of other data or settings; remove it or choose another --out"
            )
        for split, (path, state) in self._sources.items():
            own = {record.file: record for record in records if record.file.rpartition("-")[0] == split}
            if before.get(split) == state:
                self.shards |= own
            elif own:
                warnings.warn(
                    f"{path}: changed since packing was interrupted; its shards are written again", stacklevel=2
                )

    def add(self, shard: ShardRecord) -> None:
        self.shards[shard.file] = shard
        self._write()

    def discard(self, names: Iterable[str]) -> None:
        """Remove the records of shards, so that the next call writes these shards again."""
        for name in names:
            self.shards.pop(name, None)
        self._write()

    def _write(self) -> None:
        content = {
            "asked": self._asked,
            "sources": {split: state for split, (_, state) in self._sources.items()},
            "shards": [attrs.asdict(one) for one in self.shards.values()],
        }
        atomic.write_text(self.path, json.dumps(content) + "\n")


def check_empty(folder: Path, kept: str | None = None) -> None:
    """Raise ValueError if a folder contains anything but `kept`, the lock and temporary files of the notes."""
    known = (store_format.LOCK, kept)
    # A call that was killed before its first record leaves at most such a file.
    temporary = atomic.temporary_pattern(UNFINISHED)
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    found = min((name for name in names if name not in known and not fnmatchcase(name, temporary)), default=None)
    if found is not None:
        raise ValueError(
            f"{folder}: expected an empty folder or a feature store, found {shown(found)}; choose another --out"
        )


def _is_of(manifest: Manifest, asked: dict[str, Any]) -> bool:
    """Return whether a finished store has the asked data and settings. The size of shards may differ."""
    held = {split.name: {"features": split.features, "index": split.index_sha256} for split in manifest.splits}
    return (manifest.dtype, manifest.vocabulary, held) == (asked["dtype"], asked["vocabulary"], asked["splits"])


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Raise ValueError if a file of a finished store is missing or truncated, or an index is damaged."""
    try:
        check_vocabulary(folder / store_format.VOCABULARY, manifest.vocabulary)
        for split in manifest.splits:
            store_format.read_index(folder / split.index, split)
            for shard in split.shards:
                store_format.check_shard(folder / shard.file, manifest.dtype, shard, split.width)
    except ValueError as error:
        raise ValueError(f"{error}; remove {folder} and pack again") from None
