"""Import pictures: encode them or detect their regions for a feature store, or write a store of resized pictures.

Inside: `import_features`, `import_regions`, `import_pictures`, `SHARD_BYTES`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from itm_fast.data.dataset import CaptionDataset
from itm_fast.data.detected_splits import detected_splits, remove_detections, source_digest
from itm_fast.data.detections import DetectedPictures, Detector
from itm_fast.data.features import Features
from itm_fast.data.pack import States, pack_splits
from itm_fast.data.picture_folder import SplitPictures
from itm_fast.data.picture_sources import EncodedPictures, Encoder, ResizedPictures
from itm_fast.data.precomputed import PrecomputedDataset
from itm_fast.data.preprocessing import KeptProportions, Preprocessing
from itm_fast.data.store_format import MOST_REGIONS, Manifest
from itm_fast.data.vocabulary import Vocabulary

__all__ = ["SHARD_BYTES", "import_features", "import_pictures", "import_regions"]

# An interrupted import continues with a shard, so shards are small beside the time that encoding takes.
SHARD_BYTES = 64 * 2**20


Source = EncodedPictures | DetectedPictures | ResizedPictures


class _ImportedSplit(PrecomputedDataset):
    """A split of an import with the interface that packing needs."""

    def __init__(self, pictures: SplitPictures, source: Source, captions: Path, vocabulary: Vocabulary) -> None:
        self.directory, self.split, self.features_path, self.repeated = captions.parent, pictures.name, captions, 1
        self._pictures = pictures
        self._digest = source_digest(source.digest, pictures)
        CaptionDataset.__init__(
            self, source, pictures.captions, pictures.caption_image, vocabulary, image_ids=pictures.names,
            boxes=source.boxes if isinstance(source, DetectedPictures) else None, name=str(captions),
        )  # fmt: skip

    def features_digest(self) -> str:
        return self._digest

    def reopened(self) -> Features:
        return self.source

    def place_of(self, image: int) -> str:
        return str(self._pictures.paths[image])


def import_features(
    splits: Sequence[SplitPictures],
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
    sources = [EncodedPictures(split, encoder, workers) for split in splits]
    return _import(splits, sources, captions, Path(out), dtype, vocabulary, min_count, shard_bytes, progress)


def import_regions(
    splits: Sequence[SplitPictures],
    captions: Path,
    out: str | os.PathLike[str],
    detector: Detector,
    *,
    dtype: str = "bf16",
    vocabulary: Vocabulary | None = None,
    min_count: int = 4,
    workers: int = 0,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> Manifest:
    """Detect the regions of pictures and write a feature store with their boxes; see `import_features`.

    The regions are kept in files in `out` until those of all pictures are known. An interrupted import continues there.

    Args:
        detector: finds the regions of a picture.

    Raises:
        ValueError, OSError: as `import_features`; the detector returns values that are not finite.
    """
    out = Path(out)
    sources = detected_splits(splits, detector, out, dtype, workers, progress)
    manifest = _import(splits, sources, captions, out, dtype, vocabulary, min_count, shard_bytes, progress)
    remove_detections(out)
    return manifest


def import_pictures(
    splits: Sequence[SplitPictures],
    captions: Path,
    out: str | os.PathLike[str],
    preprocessing: Preprocessing | KeptProportions,
    *,
    grid: int = 7,
    dtype: str = "jpeg",
    quality: int = 90,
    vocabulary: Vocabulary | None = None,
    min_count: int = 4,
    workers: int = 0,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> Manifest:
    """Resize pictures and write a store of JPEG or WebP files; see `import_features` for the other arguments.

    Args:
        preprocessing: the size of the pictures. `KeptProportions` is for pictures that boxes are drawn on.
        grid: patches per side, each of which is a region.
        dtype: "jpeg" or "webp".
        quality: of the compression, 1 to 100.

    Raises:
        ValueError, OSError: as `import_features`; the side of a picture is no multiple of `grid`, or there are too many
            patches.
    """
    if grid < 1 or preprocessing.side % grid or grid**2 > MOST_REGIONS:
        most = math.isqrt(MOST_REGIONS)
        raise ValueError(
            f"grid: expected a divisor of {preprocessing.side}, the pixels of a side, up to {most}, got {grid}"
        )
    sources = [ResizedPictures(split, preprocessing, grid, dtype, quality, workers) for split in splits]
    return _import(splits, sources, captions, Path(out), dtype, vocabulary, min_count, shard_bytes, progress)


def _import(
    splits: Sequence[SplitPictures],
    sources: Sequence[Source],
    captions: Path,
    out: Path,
    dtype: str,
    vocabulary: Vocabulary | None,
    min_count: int,
    shard_bytes: int,
    progress: bool,
) -> Manifest:
    # The captions are in memory, and the notes of an unfinished import hold their digest.
    states: dict[str, States] = {split.name: {} for split in splits}
    train = next((split for split in splits if split.name == "train"), None)
    if vocabulary is None and train is None:
        raise ValueError(f"{captions}: no split train, from which the vocabulary is built; choose one with --vocab")
    words = vocabulary or Vocabulary.build(train.captions if train else (), min_count)
    datasets = [_ImportedSplit(split, source, captions, words) for split, source in zip(splits, sources, strict=True)]
    for data in datasets:
        if data.split == "train" and vocabulary is None:
            data.warn_of_rare_words(min_count, captions)
    return pack_splits(datasets, states, out, dtype, words, shard_bytes, progress=progress)
