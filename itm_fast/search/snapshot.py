"""One state of an index: its open segments, what they find, and what they hold. It never changes.

Inside: `Snapshot`, `Side`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from itm_fast.files.messages import shown
from itm_fast.fragments import Fragments
from itm_fast.search.lookup import Lookup
from itm_fast.search.manifest import SIDES, Manifest
from itm_fast.search.members import Encodings
from itm_fast.search.pooling import Pooling
from itm_fast.search.results import Item
from itm_fast.search.rows import decoded_rows
from itm_fast.search.segments import Segment, map_file

__all__ = ["Side", "Snapshot"]

# An index of at most this size stays in memory: to release pages and read them again makes searches slower.
_WHOLE = 2**31
# Of a larger one, memory for what it holds besides pooled vectors. A page fault maps up to 64 KiB around an item. With
# this limit, a million images of 36 rows of 256 channels are searched within 2 GB.
_MAPPED, _AROUND = 3 * 2**28, 2**16
# Inner products of pooled vectors in memory at a time.
_PRODUCTS = 2**24


class Side:
    """The items of one side in all segments. Positions count through the segments, deleted items included."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = list(segments)
        sizes = torch.tensor([0, *map(len, self.segments)])
        self._firsts = sizes.cumsum(0)
        self.live = (
            torch.cat([one.live for one in self.segments]) if self.segments else torch.zeros(0, dtype=torch.bool)
        )
        self._dead = (~self.live).nonzero().squeeze(1)
        self.count = len(self.live) - len(self._dead)
        size = sum(one.record.bytes for one in self.segments)
        # Memory that the pages of an item take; 0 if the index stays in memory.
        self._mapped = size // len(self.live) + _AROUND if size > _WHOLE else 0
        self._touched = 0
        if self._mapped:
            for segment in self.segments:
                segment.scatter()

    def nearest(self, queries: Tensor, n: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each query the greatest inner products (n,) of live items, and their positions in ascending order.

        Args:
            queries: pooled vectors (n_queries, D).
            n: at most the number of live items.
        """
        for part in queries.split(max(_PRODUCTS // max(len(self.live), 1), 1)):
            for products in self.products(part):
                positions = products.topk(n, sorted=False).indices.sort().values
                yield products[positions], positions

    def products(self, queries: Tensor) -> Tensor:
        """Return the inner products (n_queries, positions) of pooled vectors; minus infinity for deleted items."""
        parts = []
        for segment in self.segments:
            pooled = segment.stored["pooled"]
            # In this order a single query takes half the time.
            parts.append((pooled @ queries.to(pooled.dtype).t()).t().to(torch.float32))
        products = torch.cat(parts, 1)
        products[:, self._dead] = -torch.inf
        return products

    def best_rows(self, query: Encodings, positions: Tensor, *, reverse: bool) -> Tensor:
        """Score a query with items at ascending positions (n,) int64 by MaxSim: (n,), the sum over models with rows.

        Args:
            query: the embeddings of one query.
            positions: the items.
            reverse: the rows of the items look for the best row of the query, not the other way round.
        """
        found = []
        for few in positions.split(_MAPPED // self._mapped + 1 if self._mapped else max(len(positions), 1)):
            self._touch(few)
            fits = torch.zeros(len(few))
            for member, own in enumerate(query):
                if isinstance(own, Fragments):
                    parts = [part.best_rows(member, own, items, reverse=reverse) for part, items in self._split(few)]
                    fits += torch.cat(parts)
            found.append(fits)
        return torch.cat(found)

    def positions(self) -> Tensor:
        """Return the positions of all live items."""
        return self.live.nonzero().squeeze(1)

    def encodings(self, positions: Tensor) -> Encodings:
        """Return the embeddings of items at ascending positions (n,) int64."""
        self._touch(positions)
        parts = [segment.rows(own) for segment, own in self._split(positions)]
        return [
            decoded_rows(one) if "lengths" in one[0] else torch.cat([part["values"] for part in one])
            for one in zip(*parts, strict=True)
        ]

    def _touch(self, positions: Tensor) -> None:
        """Prepare to read items of a large index: release mapped pages if there are many, and fetch the items."""
        if not self._mapped:
            return
        self._touched += len(positions) * self._mapped
        if self._touched > _MAPPED:
            for segment in self.segments:
                segment.release()
            self._touched = len(positions) * self._mapped
        for segment, items in self._split(positions):
            segment.fetch(items)

    def _split(self, positions: Tensor) -> Iterator[tuple[Segment, Tensor]]:
        bounds = torch.searchsorted(positions, self._firsts).tolist()
        for segment, first, start, end in zip(self.segments, self._firsts.tolist(), bounds, bounds[1:], strict=False):
            if end > start:
                yield segment, positions[start:end] - first

    def _place(self, position: int) -> tuple[Segment, int]:
        number = int(torch.searchsorted(self._firsts, position, right=True)) - 1
        return self.segments[number], position - int(self._firsts[number])

    def item(self, position: int) -> Item:
        segment, number = self._place(position)
        return segment.item(number)

    def thumbnail(self, position: int) -> bytes:
        segment, number = self._place(position)
        return segment.bytes("thumbnails", number)

    @functools.cached_property
    def ids(self) -> Lookup:
        """The live items by id; made on first use."""
        return Lookup(self.segments, "ids", self.live)

    @functools.cached_property
    def owners(self) -> Lookup:
        """The live captions by the id of their image; made on first use."""
        return Lookup(self.segments, "owners", self.live)

    def find(self, name: str) -> int:
        """Return the position of an item; ValueError if there is none of this id."""
        found = self.ids.positions(name)
        if not found:
            raise ValueError(f"id: the index holds no item {shown(name)}")
        return found[0]


class Snapshot:
    """The segments of a manifest.

    Args:
        directory: the index.
        manifest: its manifest.

    Attributes:
        manifest: the argument.
        sides: the images and the captions.
        pooling: the pooling of the index.

    Raises:
        FileNotFoundError: a file is missing, as when the index was changed since the manifest was read.
        ValueError: a file is damaged. The message names it.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        members = len(manifest.models)
        segments = [Segment(directory, record, members) for record in manifest.segments]
        self.sides = {side: Side([one for one in segments if one.record.side == side]) for side in SIDES}
        self.pooling = Pooling([None] * members)
        if manifest.weights is not None:
            try:
                self.pooling = Pooling.of_tensors(map_file(directory, manifest.weights).tensors, members)
            except ValueError as error:
                raise ValueError(f"{directory / manifest.weights.file}: {error}") from None

    @functools.cached_property
    def revision(self) -> str:
        """The revision of the manifest; computed on first use."""
        return self.manifest.revision()
