"""Import pictures: encode them and write a feature store.

Inside: `Encoder`, `EncodedPictures`, `import_features`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from itm_fast.data.dataset import CaptionDataset
from itm_fast.data.digests import sha256_of_parts
from itm_fast.data.features import Features
from itm_fast.data.pack import pack_splits, state_of
from itm_fast.data.picture_files import decoded
from itm_fast.data.picture_folder import SplitPictures
from itm_fast.data.precomputed import PrecomputedDataset
from itm_fast.data.preprocessing import Preprocessing
from itm_fast.data.store_format import Manifest
from itm_fast.data.vocabulary import Vocabulary

__all__ = ["SHARD_BYTES", "EncodedPictures", "Encoder", "import_features"]

# An interrupted import continues with a shard, so shards are small beside the time that encoding takes.
SHARD_BYTES = 64 * 2**20
# Pictures per call of the encoder.
_BATCH = 32


class Encoder(Protocol):
    """What turns pictures into regions."""

    @property
    def preprocessing(self) -> Preprocessing: ...

    @property
    def regions(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def digest(self) -> str: ...

    def __call__(self, pixels: Tensor) -> Tensor: ...


class EncodedPictures(Features):
    """Features that an encoder computes from picture files when they are read.

    Args:
        pictures: the pictures of a split.
        encoder: turns pixels (n, side, side, 3) uint8 into regions (n, k, f) float32.
        workers: processes that decode.
    """

    in_process = False
    counts = None
    dtype = torch.float32

    def __init__(self, pictures: SplitPictures, encoder: Encoder, workers: int) -> None:
        self.shape = (len(pictures.paths), encoder.regions, encoder.width)
        self._paths, self._encoder, self._workers = pictures.paths, encoder, workers
        self._items: Iterator[np.ndarray | ValueError] = iter(())
        self._next = -1

    def gather(self, images: np.ndarray) -> Tensor:
        """Encode pictures in any order; slow for many."""
        blocks = [self.stored(image, image + 1) for image in images.tolist()]
        return torch.cat(blocks).view(len(images), *self.shape[1:])

    def stored(self, first: int, last: int) -> Tensor:
        """Encode pictures `first` to `last - 1`. Worker processes decode on, so read the pictures in order."""
        if first != self._next:
            self._items = decoded(self._paths[first:], self._encoder.preprocessing.picture, self._workers)
        self._next = last
        return torch.cat([self._encoded(start, min(start + _BATCH, last)) for start in range(first, last, _BATCH)])

    def _encoded(self, first: int, last: int) -> Tensor:
        pixels = []
        for _ in range(first, last):
            item = next(self._items)
            if isinstance(item, ValueError):
                raise item
            pixels.append(item)
        rows = self._encoder(torch.from_numpy(np.stack(pixels)))
        finite = rows.isfinite().all(2).all(1)
        if not bool(finite.all()):
            image = first + int((~finite).nonzero()[0, 0])
            raise ValueError(f"{self._paths[image]}: the encoder returns values that are not finite")
        return rows.reshape(-1, self.shape[2])


class _ImportedSplit(PrecomputedDataset):
    """A split of an import with the interface that packing needs."""

    def __init__(
        self, pictures: SplitPictures, source: EncodedPictures, digest: str, captions: Path, vocabulary: Vocabulary
    ) -> None:
        self.directory, self.split, self.features_path, self.repeated = captions.parent, pictures.name, captions, 1
        self._pictures = pictures
        self._digest = sha256_of_parts(digest.encode(), *(look.digest for look in pictures.looks))
        CaptionDataset.__init__(
            self, source, pictures.captions, pictures.caption_image, vocabulary, image_ids=pictures.names,
            name=str(captions),
        )  # fmt: skip

    def features_digest(self) -> str:
        return self._digest

    def reopened(self) -> Features:
        return self.source

    def place_of(self, image: int) -> str:
        return str(self._pictures.paths[image])


def import_features(
    splits: list[SplitPictures],
    captions: Path,
    out: str | os.PathLike[str],
    encoder: Encoder,
    *,
    dtype: str = "bf16",
    vocabulary: Vocabulary | None = None,
    min_count: int = 4,
    workers: int = 0,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> Manifest:
    """Encode pictures and write a feature store, as `pack` does: an interrupted import continues with the next shard.

    Args:
        splits: the pictures, as `collect` returns them.
        captions: the file that the captions were read from.
        out: the folder of the store.
        encoder: turns pictures into regions.
        dtype: the stored type: "bf16", "fp16" or "fp32".
        vocabulary: of the token ids; None: built from the captions of "train".
        min_count: minimum occurrences of a word in a vocabulary that is built.
        workers: processes that decode; 0: this process.
        shard_bytes: approximate size of a shard.
        progress: show a progress bar on a terminal.

    Raises:
        ValueError, OSError: as `pack`; a picture that was decoded before can no longer be decoded.
    """
    states = {split.name: {captions: state_of(captions)} for split in splits}
    train = next((split for split in splits if split.name == "train"), None)
    if vocabulary is None and train is None:
        raise ValueError(f"{captions}: no split train, from which the vocabulary is built; choose one with --vocab")
    words = vocabulary or Vocabulary.build(train.captions if train else (), min_count)
    datasets = [
        _ImportedSplit(split, EncodedPictures(split, encoder, workers), encoder.digest, captions, words)
        for split in splits
    ]
    for data in datasets:
        if data.split == "train" and vocabulary is None:
            data.warn_of_rare_words(min_count)
    return pack_splits(datasets, states, Path(out), dtype, words, shard_bytes, progress=progress)
