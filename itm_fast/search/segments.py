"""Segments: files that hold some items of one side, and never change.

Inside: `Segment`, `write_segment`, `write_tensors`, `joined_parts`, `map_file`.

A segment is a safetensors file. Of each model m: `{m}.values` (N, d), `{m}.offsets` (items + 1,) int64, and with int8
`{m}.scales` (N,). A model with one vector per item has only `{m}.values` (items, d) float32. Then `pooled` (items, D)
bfloat16, or float32 if a model has one vector per item, and the columns of texts: `{column}` uint8, end to end, with
`{column}.ends` (items + 1,) int64.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from itm_fast.files import atomic, regular
from itm_fast.fragments import Fragments
from itm_fast.search.manifest import FileRecord, SegmentRecord
from itm_fast.search.mapped import MappedFile
from itm_fast.search.members import Encodings
from itm_fast.search.results import Item
from itm_fast.search.rows import chosen_rows, encoded_rows, stored_best_rows

__all__ = ["Segment", "joined_parts", "map_file", "write_segment", "write_tensors"]

_TEXTS = ("ids", "captions", "pictures", "owners")
_COLUMNS = (*_TEXTS, "thumbnails")
_BETWEEN = "\0"  # between the captions of an image

Stored = dict[str, Tensor]


def packed(
    items: Sequence[Item], thumbnails: Sequence[bytes], encodings: Encodings, pooled: Tensor, dtype: str
) -> Stored:
    """Return the tensors that a segment stores of some items."""
    # The vector of a model without rows is its score; all others only choose what is scored.
    exact = any(isinstance(embeddings, Tensor) for embeddings in encodings)
    stored: Stored = {"pooled": pooled.to(torch.float32 if exact else torch.bfloat16)}
    for member, embeddings in enumerate(encodings):
        if isinstance(embeddings, Tensor):
            stored[f"{member}.values"] = embeddings
            continue
        stored |= {f"{member}.{name}": one for name, one in encoded_rows(embeddings.values, dtype).items()}
        stored[f"{member}.offsets"] = embeddings.offsets.to(torch.int64)
    texts = {
        "ids": [item.id for item in items],
        "captions": [_BETWEEN.join(item.captions) for item in items],
        "pictures": [item.picture for item in items],
        "owners": [item.image for item in items],
    }
    columns = {name: [text.encode("utf-8", "surrogateescape") for text in column] for name, column in texts.items()}
    for name, column in {**columns, "thumbnails": list(thumbnails)}.items():
        content = np.frombuffer(b"".join(column), dtype=np.uint8)
        stored[name] = torch.from_numpy(content.copy())
        stored[f"{name}.ends"] = torch.tensor([0, *map(len, column)], dtype=torch.int64).cumsum(0)
    return stored


def chosen_of(stored: Mapping[str, Tensor], items: Tensor) -> Stored:
    """Return the stored tensors of the items (n,) int64 of a segment, bit for bit."""
    found: Stored = {}
    for name, tensor in stored.items():
        base, _, suffix = name.rpartition(".")
        if suffix in ("offsets", "ends"):
            lengths = tensor.diff()[items]
            found[name] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            continue
        ends = stored.get(f"{base}.offsets" if suffix in ("values", "scales") else f"{name}.ends")
        if ends is None:
            found[name] = tensor[items]
        else:
            rows = Fragments(torch.empty(0, 1), ends, check=False).row_index(items)
            found[name] = tensor[rows]
    return found


def joined_parts(parts: Sequence[Mapping[str, Tensor]]) -> Stored:
    """Concatenate the stored tensors of several segments of one side."""
    found: Stored = {}
    for name in parts[0]:
        columns = [part[name] for part in parts]
        if name.endswith((".offsets", ".ends")):
            found[name] = torch.cat(
                [torch.zeros(1, dtype=torch.int64), torch.cat([c.diff() for c in columns]).cumsum(0)]
            )
            continue
        found[name] = torch.cat(columns)
    return found


def write_tensors(directory: Path, kind: str, stored: Mapping[str, Tensor]) -> FileRecord:
    """Write tensors under a new name `{kind}-XXXXXXXX.safetensors`."""
    content = save({name: tensor.contiguous() for name, tensor in stored.items()})
    name = f"{kind}-{secrets.token_hex(4)}.safetensors"
    atomic.write_bytes(directory / name, content, directory)
    return FileRecord(name, len(content), hashlib.sha256(content).hexdigest())


def write_segment(directory: Path, side: str, stored: Mapping[str, Tensor]) -> SegmentRecord:
    record = write_tensors(directory, side, stored)
    return SegmentRecord(record.file, record.bytes, record.sha256, side, len(stored["pooled"]))


def map_file(directory: Path, record: FileRecord | SegmentRecord) -> MappedFile:
    """Map the tensors of a file into memory, without reading them.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: its size is not that in the manifest, or its header is damaged. The message names the file.
    """
    path = directory / record.file
    with regular.open_file(path) as file:
        size = file.seek(0, 2)
        if size != record.bytes:
            raise ValueError(f"{path}: the index wrote {record.bytes:,} bytes, the file has {size:,}")
        return MappedFile(file, path)


class Segment:
    """An open segment: tensors in mapped memory.

    Args:
        directory: the index.
        record: the segment's record in the manifest.
        members: number of models.

    Attributes:
        record: the argument.
        stored: the tensors by name.
        live: bool (items,), False for deleted items.

    Raises:
        FileNotFoundError, ValueError: as `map_file`; or a tensor is missing or does not fit the others.
    """

    def __init__(self, directory: Path, record: SegmentRecord, members: int) -> None:
        self.record, self._mapped = record, map_file(directory, record)
        self.stored = self._mapped.tensors
        self.live = torch.from_numpy(record.live())
        self.members = members
        problem = self._problem()
        if problem:
            raise ValueError(f"{directory / record.file}: damaged: {problem}")

    def _problem(self) -> str:
        """Return what does not fit; offsets are compared with the sizes of what they delimit."""
        names = ["pooled", *(f"{member}.values" for member in range(self.members))]
        names += [name for column in _COLUMNS for name in (column, f"{column}.ends")]
        missing = [name for name in names if name not in self.stored]
        if missing:
            return f"there is no {missing[0]}"
        tables = ["pooled", *names[1 : 1 + self.members]]
        flat = next((name for name in tables if self.stored[name].dim() != 2), None)
        if flat is not None:
            return flat
        if self.stored["pooled"].shape[0] != self.record.items:
            return "pooled has another number of items"
        for member in range(self.members):
            values, offsets = (self.stored.get(f"{member}.{name}") for name in ("values", "offsets"))
            scales = self.stored.get(f"{member}.scales")
            assert values is not None
            if scales is not None and scales.shape != values.shape[:1]:
                return f"{member}.scales"
            if values.shape[0] != self.record.items if offsets is None else bool((offsets.diff() < 0).any()):
                return f"{member}.values" if offsets is None else f"{member}.offsets"
        for name, tensor in self.stored.items():
            base, _, suffix = name.rpartition(".")
            if suffix in ("offsets", "ends"):
                rows = self.stored.get(f"{base}.values" if suffix == "offsets" else base)
                if (
                    rows is None
                    or tensor.shape != (self.record.items + 1,)
                    or int(tensor[0])
                    or (int(tensor[-1]) != len(rows))
                ):
                    return name
        return ""

    def __len__(self) -> int:
        return self.record.items

    def release(self) -> None:
        """Take the pages of the file out of the memory of this process. Pooled vectors stay: each search reads all."""
        self._mapped.release(["pooled"])

    def scatter(self) -> None:
        """Announce that items are read in no order."""
        self._mapped.scatter(["pooled"])

    def fetch(self, items: Tensor) -> None:
        """Begin to read the embeddings of items at ascending numbers (n,) int64 from the disk."""
        for member in range(self.members):
            ends = self.stored.get(f"{member}.offsets")
            starts = items if ends is None else ends[items]
            self._mapped.fetch(f"{member}.values", starts, items + 1 if ends is None else ends[items + 1])

    def rows(self, items: Tensor) -> list[Stored]:
        """Return what is stored of items (n,) int64 for each model: as `chosen_rows`, or one vector per item."""
        found: list[Stored] = []
        for member in range(self.members):
            own = {name: self.stored.get(f"{member}.{name}") for name in ("values", "offsets", "scales")}
            known = {name: one for name, one in own.items() if one is not None}
            found.append(chosen_rows(known, items) if "offsets" in known else {"values": known["values"][items]})
        return found

    def best_rows(self, member: int, query: Fragments, items: Tensor, *, reverse: bool) -> Tensor:
        """Score a query with items (n,) int64 by MaxSim of a model's rows, as `rows.stored_best_rows`."""
        own = {name: self.stored.get(f"{member}.{name}") for name in ("values", "offsets", "scales")}
        known = {name: one for name, one in own.items() if one is not None}
        return stored_best_rows(query, known, items, reverse=reverse)

    def text(self, column: str, item: int) -> str:
        return self.bytes(column, item).decode("utf-8", "surrogateescape")

    def bytes(self, column: str, item: int) -> bytes:
        ends = self.stored[f"{column}.ends"]
        return self.stored[column][int(ends[item]) : int(ends[item + 1])].numpy().tobytes()

    def item(self, number: int) -> Item:
        texts = {name: self.text(name, number) for name in _TEXTS}
        captions = tuple(texts["captions"].split(_BETWEEN)) if texts["captions"] else ()
        return Item(texts["ids"], self.record.side, captions, texts["pictures"], texts["owners"])

    def kept(self) -> Stored:
        """Return the stored tensors of the items that are not deleted."""
        live = self.live.nonzero().squeeze(1)
        return dict(self.stored) if len(live) == len(self) else chosen_of(self.stored, live)


def without(record: SegmentRecord, items: Sequence[int]) -> SegmentRecord:
    """Return a record with more items deleted."""
    live = record.live()
    live[list(items)] = False
    return attrs.evolve(record).with_live(live)
