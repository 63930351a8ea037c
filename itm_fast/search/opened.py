"""An open index: its state on disk, its models and its items. It does not search and does not change anything.

Inside: `OpenIndex`.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from itm_fast.files import regular
from itm_fast.search.manifest import MANIFEST, Manifest, read_manifest
from itm_fast.search.members import Members, Models, members_of
from itm_fast.search.results import Item
from itm_fast.search.snapshot import Snapshot

__all__ = ["OpenIndex"]

# A writer may remove a file between the reading of the manifest and the opening of the file.
_TRIES = 20


class OpenIndex:
    """The part of `Index` that reads. Any number of threads may share it.

    Args:
        path: the folder.
        model: as in `Index.open`.
        device: where models that are loaded run.

    Attributes:
        path: the argument.
        snapshot: the open state; it is replaced, never changed.
    """

    def __init__(self, path: Path, model: Models | Members | None, device: torch.device | str) -> None:
        self.path = path
        self._given, self._device = model, device
        self._members: Members | None = None
        self._lock, self._reloading = threading.Lock(), threading.Lock()
        self._state: tuple[int, int, int] | None = None
        self.snapshot = self._opened()

    @property
    def members(self) -> Members:
        """The models, which are loaded on first use; ValueError if they are not those of the index."""
        with self._lock:
            if self._members is None:
                self._members = members_of(self.path, self.manifest, self._given, self._device)
            return self._members

    @property
    def manifest(self) -> Manifest:
        return self.snapshot.manifest

    def __len__(self) -> int:
        """Return the number of images and captions."""
        return sum(side.count for side in self.snapshot.sides.values())

    def size(self, side: str = "images") -> int:
        """Return the number of images or captions."""
        return self.snapshot.sides[side].count

    def items(self, side: str = "images") -> list[Item]:
        """Return all images or captions in the order of their addition."""
        own = self.snapshot.sides[side]
        return [own.item(position) for position in own.positions().tolist()]

    def item(self, name: str, side: str = "images") -> Item:
        """Return an item by its id; ValueError if there is none."""
        own = self.snapshot.sides[side]
        return own.item(own.find(name))

    def thumbnail(self, name: str) -> bytes | None:
        """Return a WebP file of an image, at most 192 pixels per side; None if the index holds no picture of it."""
        own = self.snapshot.sides["images"]
        return own.thumbnail(own.find(name)) or None

    def info(self) -> dict[str, Any]:
        """Return what the index holds and how it was built, as plain values."""
        manifest, sides = self.manifest, self.snapshot.sides
        return {
            **{name: side.count for name, side in sides.items()},
            "deleted": sum(len(side.live) - side.count for side in sides.values()),
            "bytes": sum(one.bytes for one in manifest.segments) + (manifest.weights.bytes if manifest.weights else 0),
            "segments": len(manifest.segments),
            "dtype": manifest.dtype,
            "pooling": manifest.pooling,
            "candidates": manifest.candidates,
            "preprocessing": manifest.pictures or None,
            "generation": manifest.generation,
            "models": list(manifest.models),
            "checkpoints": list(manifest.checkpoints),
        }

    # Staying up to date

    def is_stale(self) -> bool:
        """Return whether the index on disk was changed or replaced since it was opened or reloaded."""
        return self._file_state() != self._state

    def reload(self) -> bool:
        """Open the newest state; return whether there was one. Searches in other threads finish with the old state.

        Raises:
            ValueError: the new state is damaged, or is that of another model. The old one stays open.
        """
        with self._reloading:
            if not self.is_stale():
                return False
            before = self._state
            snapshot = self._opened()
            if self._members is not None and snapshot.manifest.models != self._members.fingerprints:
                self._state = before
                raise ValueError(f"{self.path}: the index was replaced by one of another model; open it again")
            self.snapshot = snapshot
            return True

    def _file_state(self) -> tuple[int, int, int] | None:
        if not regular.is_file(self.path / MANIFEST):
            return None
        status = (self.path / MANIFEST).stat()
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _opened(self) -> Snapshot:
        for attempt in range(_TRIES):
            state = self._file_state()
            manifest = read_manifest(self.path)
            try:
                snapshot = Snapshot(self.path, manifest)
            except FileNotFoundError as error:
                if attempt == _TRIES - 1 or self._file_state() == state:
                    raise ValueError(f"{error.filename}: no such file; the index needs it") from None
                continue
            self._state = state
            return snapshot
        raise AssertionError
