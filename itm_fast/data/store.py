"""Splits of a feature store. They give the same batches as the data folder that was packed.

Inside: `StoreDataset`, `StoreFeatures`, `open_split`, `check_data`.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from itm_fast.data import layout, store_format
from itm_fast.data.dataset import CaptionDataset
from itm_fast.data.digests import sha256_of_parts
from itm_fast.data.features import Features, as_regions
from itm_fast.data.picture_shards import StoredPictures
from itm_fast.data.precomputed import PrecomputedDataset
from itm_fast.data.reader import BufferPool, ShardReader, default_threads
from itm_fast.data.store_format import DTYPES, Manifest, SplitRecord
from itm_fast.data.store_index import check_token_ids, texts
from itm_fast.data.vocabulary import Vocabulary
from itm_fast.files.messages import shown
from itm_fast.files.processors import check_count
from itm_fast.fragments import Fragments

__all__ = ["StoreDataset", "StoreFeatures", "check_data", "open_split"]

# For each source type, the stored types that give the same float32 batches.
_LOSSLESS = {"float16": ("fp16", "fp32"), "float32": ("fp32",), "float64": ("fp32",)}


def check_data(directory: str | os.PathLike[str], split: str) -> None:
    """Raise ValueError if a data folder or feature store lacks a split."""
    store_format.check_finished(directory)
    if not store_format.is_store(directory):
        layout.check_split(directory, split)
        return
    manifest = store_format.read_manifest(directory)
    if manifest.split(split) is None:
        found = ", ".join(one.name for one in manifest.splits)
        raise ValueError(f"{directory}: there is no split {split!r} (splits in this feature store: {found})")


def open_split(
    directory: str | os.PathLike[str], split: str, vocabulary: Vocabulary, *, max_images: int | None = None
) -> PrecomputedDataset:
    """Open a split of a data folder or of a feature store; see `PrecomputedDataset`."""
    check_data(directory, split)
    kind = StoreDataset if store_format.is_store(directory) else PrecomputedDataset
    return kind(directory, split, vocabulary, max_images=max_images)


class StoreFeatures(Features):
    """Features in the shards of a split. Several threads read them into reused memory.

    Args:
        directory: the store.
        dtype: the stored type: "bf16", "fp16" or "fp32".
        split: the split's record in the manifest.
        counts: (n_images,) int64, the regions of each image; None if all have the same number.
        threads: reader threads; 0: one per processor of this process, at most eight.

    Raises:
        ValueError: a shard is missing, truncated, or not the one that the store wrote (the message names it), or there
            are too many threads.
    """

    in_process = True

    def __init__(
        self,
        directory: Path,
        dtype: str,
        split: SplitRecord,
        counts: np.ndarray | None,
        *,
        threads: int = 0,
    ) -> None:
        check_count("threads", threads)
        self.shape, self.counts = (split.images, split.regions, split.width), counts
        self.dtype, self._dtype = DTYPES[dtype], dtype
        self._paths = [directory / shard.file for shard in split.shards]
        states = [
            store_format.check_shard(path, dtype, shard, split.width)
            for path, shard in zip(self._paths, split.shards, strict=True)
        ]
        self._reader = ShardReader(self._paths, states, dtype, threads or default_threads())
        self._buffers = BufferPool()
        lengths = np.full(split.images, split.regions) if counts is None else counts
        images = np.array([shard.images for shard in split.shards])
        self._firsts = np.cumsum(images) - images
        self._file = np.repeat(np.arange(len(images)), images)
        # The byte at which each image starts in its shard: after the header and the shard's earlier images.
        ends = np.cumsum(lengths)
        starts = ends - lengths
        headers = [len(store_format.shard_header(dtype, shard.regions, split.width)) for shard in split.shards]
        row_bytes = split.width * self.dtype.itemsize
        self._offset = (starts - starts[self._firsts][self._file]) * row_bytes + np.array(headers)[self._file]

    def pin_batches(self) -> None:
        self._buffers = BufferPool(pin=True)

    def keep(self, n_images: int) -> None:
        """Drop all images but the first `n_images`."""
        self.shape = (n_images, *self.shape[1:])
        self.counts = None if self.counts is None else self.counts[:n_images]

    def gather(self, images: np.ndarray) -> Tensor | Fragments:
        counts = np.full(len(images), self.shape[1]) if self.counts is None else self.counts[images]
        total = int(counts.sum())
        size, dtype = total * self.shape[2], self.batch_dtype
        # Buffers consist of float32 numbers, whatever they are used for.
        rows = self._buffers.take(-(-size * dtype.itemsize // 4)).view(dtype)[:size]
        wanted = "fp32" if dtype == torch.float32 else self._dtype
        self._read(images, counts, _as_numbers(rows, wanted), wanted)
        chosen = None if self.counts is None else counts
        return as_regions(rows.view(total, self.shape[2]), chosen, self.shape, len(images))

    def stored(self, first: int, last: int) -> Tensor:
        images = np.arange(first, last)
        counts = np.full(len(images), self.shape[1]) if self.counts is None else self.counts[images]
        rows = torch.empty(int(counts.sum()), self.shape[2], dtype=self.dtype)
        self._read(images, counts, _as_numbers(rows, self._dtype), self._dtype)
        return rows

    def _read(self, images: np.ndarray, counts: np.ndarray, buffer: np.ndarray, wanted: str) -> None:
        sizes = counts * self.shape[2]
        # Read files in their own order, whatever the order of `images`.
        order = np.argsort(images, kind="stable")
        chosen = images[order]
        places = (np.cumsum(sizes) - sizes)[order]
        table = np.stack([self._file[chosen], self._offset[chosen], sizes[order], places], axis=1)
        problem, position, detail = self._reader.gather(table, buffer, wanted)
        if problem:
            raise self._error(problem, int(chosen[position]), int(sizes[order][position]), detail)

    def place_of(self, image: int) -> str:
        """Return the shard of an image and its row there, for messages."""
        shard = int(self._file[image])
        return f"{self._paths[shard]}: row {image - int(self._firsts[shard])} (image {image})"

    def _error(self, problem: str, image: int, size: int, detail: int) -> ValueError:
        where = self.place_of(image)
        what = {
            "changed": "cannot be read: the shard was changed or replaced since it was opened",
            "short read": f"truncated: expected {size * self.dtype.itemsize:,} bytes, found {detail:,}",
            "not readable": f"cannot be read: {os.strerror(detail)}",
            "not finite": "holds values that are not finite",
        }[problem]
        return ValueError(
            f"{where} {what}" if problem in ("changed", "not readable", "not finite") else f"{where}: {what}"
        )


_INTEGERS = {"bf16": np.uint16, "fp16": np.uint16, "fp32": np.float32}


def _as_numbers(rows: Tensor, dtype: str) -> np.ndarray:
    """Return the memory of a tensor as the flat array that the reader fills."""
    return rows.view(torch.uint8).numpy().reshape(-1).view(_INTEGERS[dtype])


class StoreDataset(PrecomputedDataset):
    """One split of a feature store, with the interface of `PrecomputedDataset`.

    Args:
        directory: the store.
        split: the split.
        vocabulary: turns captions into token ids. The stored token ids are used if it is the vocabulary of the store.
        max_images: use only the first images and their captions; None: all images.

    Raises:
        ValueError: the split or a file of the store is missing or damaged.
    """

    features: StoreFeatures | StoredPictures

    def __init__(
        self,
        directory: str | os.PathLike[str],
        split: str,
        vocabulary: Vocabulary,
        *,
        max_images: int | None = None,
    ) -> None:
        if max_images is not None and max_images < 1:
            raise ValueError(f"max_images: expected at least 1, got {max_images}")
        check_data(directory, split)
        self.directory, self.split = Path(directory), split
        manifest = store_format.read_manifest(directory)
        record = next(one for one in manifest.splits if one.name == split)
        self.features_path = self.directory / record.shards[0].file
        self.repeated = record.repeated
        self._max_images, self._record, self._dtype = max_images, record, manifest.dtype
        index_path = self.directory / record.index
        index = store_format.read_index(index_path, record)
        known = _is_of(manifest, self.directory, vocabulary)
        if known:
            check_token_ids(index_path, index, vocabulary)
        captions, caption_image = texts(index, "text"), index["caption_image"]
        image_ids = texts(index, "ids") if "ids" in index else None
        tags = texts(index, "tags") if "tags" in index else None
        token_ids, lengths, counts = index["token_ids"], index["caption_lengths"], index.get("region_counts")
        boxes = index.get("boxes")
        features: StoreFeatures | StoredPictures
        if manifest.dtype in store_format.PICTURES:
            features = StoredPictures(self.directory, manifest.dtype, record, manifest.stretched)
        else:
            features = StoreFeatures(self.directory, manifest.dtype, record, counts)
        features.encoder = manifest.encoder
        if max_images is not None and max_images < record.images:
            kept = caption_image < max_images
            token_ids = token_ids[np.repeat(kept, lengths)]
            captions = [captions[number] for number in np.flatnonzero(kept)]
            lengths, caption_image, image_ids = lengths[kept], caption_image[kept], image_ids and image_ids[:max_images]
            tags = tags and tags[:max_images]
            features.keep(max_images)
            boxes = None if boxes is None else boxes[: features.n_regions]
        encoded = (torch.from_numpy(token_ids.copy()), torch.from_numpy(lengths.copy())) if known else None
        CaptionDataset.__init__(
            self, features, captions, caption_image, vocabulary, image_ids=image_ids, token_ids=encoded,
            tags=tags, boxes=None if boxes is None else boxes.copy(), name=str(self.features_path),
        )  # fmt: skip

    def features_digest(self) -> str:
        """Return the digest of the packed features file, combined with the stored type if packing rounded them."""
        if self._dtype in _LOSSLESS.get(self._record.source_dtype, ()):
            return self._record.features
        return sha256_of_parts(self._record.features.encode(), self._dtype.encode())

    def place_of(self, image: int) -> str:
        return self.features.place_of(image)

    def _place_of_caption(self, caption: int) -> str:
        image = int(self.caption_image[caption])
        name = "" if self.image_ids is None else f" ({shown(self.image_ids[image])})"
        return f"{self.directory}: caption of image {image}{name} of {self.split}"

    @property
    def length_advice(self) -> str:
        return f"{super().length_advice} (data import: --max-tokens, --skip-bad), and write the store again"

    @property
    def zeros_advice(self) -> str:
        return f"{super().zeros_advice} of the data folder, and pack it again"

    @property
    def tags_advice(self) -> str:
        return f"{super().tags_advice}, into the data folder, and pack it again"

    @property
    def boxes_advice(self) -> str:
        return f"{super().boxes_advice}, into the data folder, and pack it again"

    def _row(self, image: int) -> int:
        return image

    def __reduce__(self) -> Any:
        # Open files and threads cannot be pickled: a worker process opens the store again.
        opened = functools.partial(
            _opened_again,
            max_images=self._max_images,
            tags=self.reads_tags,
            boxes=self.reads_boxes,
            caption_image=self.caption_image,
        )
        return opened, (self.directory, self.split, self.vocabulary)


def _opened_again(
    *arguments: Any, max_images: int | None, tags: bool, boxes: bool, caption_image: Tensor
) -> StoreDataset:
    dataset = StoreDataset(*arguments, max_images=max_images)
    dataset.caption_image = caption_image  # It may be shuffled.
    if tags:
        dataset.read_tags()
    if boxes:
        dataset.read_boxes()
    return dataset


def _is_of(manifest: Manifest, directory: Path, vocabulary: Vocabulary) -> bool:
    """Return whether the store's token ids fit `vocabulary`: the store's own vocabulary, with or without `<mask>`."""
    if not vocabulary.saveable:
        return False
    if store_format.vocabulary_digest(vocabulary) == manifest.vocabulary:
        return True
    own = Vocabulary.from_file(directory / store_format.VOCABULARY)
    return store_format.vocabulary_digest(own) == manifest.vocabulary and own.with_mask() == vocabulary
