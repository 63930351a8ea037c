"""Features and captions of one split in the published precomputed layout.

Inside: `PrecomputedDataset`.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from itm_fast.data import layout, store_format
from itm_fast.data.boxes import read_boxes
from itm_fast.data.dataset import CaptionDataset
from itm_fast.data.digests import sampled_sha256, sha256_of_parts
from itm_fast.data.features import Features
from itm_fast.data.vocabulary import MAX_RARE_SHARE, Vocabulary
from itm_fast.files import regular
from itm_fast.files.messages import shown


class PrecomputedDataset(CaptionDataset):
    """One split: memory-mapped features, and captions as token ids in memory. An item is a caption.

    `{split}_cap2im.txt`, if present, gives the image row of each caption line. Otherwise there are five captions per
    image, and caption j belongs to image j // 5. The features then hold each image once or, like some published files,
    five times in a row: sampled rows are compared, and every fifth row is used.

    Args:
        directory: contains `{split}_ims.npy`, `{split}_caps.txt` and optionally `{split}_cap2im.txt`,
            `{split}_ids.txt`, `{split}_regions.txt`, `{split}_boxes.npy` and `{split}_tags.txt`.
        split: "train", "dev", "test", "testall" or any other prefix of these files.
        vocabulary: turns the captions into token ids.
        max_images: use only the first images and their captions; None: all images.

    Attributes:
        features: np.memmap (n_images, k, f), float16, float32 or float64; stays on disk.
        captions: list of str.
        caption_image: (n_captions,) int64 tensor.
        image_ids: list of str, or None.
        n_images: the number of images; `len()` is the number of captions.
        repeated: how often the file stores each image: once or five times.

    Raises:
        ValueError: a file is missing or damaged, or the files do not fit each other; the message names file and line or
            row. Or the folder is a feature store, which `open_split` opens.
    """

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
        if store_format.is_store(directory):
            raise ValueError(
                f"{directory}: is a feature store, expected a data folder; itm_fast.data.open_split opens either"
            )
        layout.check_split(directory, split)
        self.directory, self.split = Path(directory), split
        self.features_path = layout.split_path(directory, split, "ims.npy")
        captions = layout.read_captions(layout.split_path(directory, split, "caps.txt"))
        rows = layout.open_features(self.features_path)
        caption_image, self.repeated = self._match(rows, len(captions))
        features = rows[:: self.repeated]
        counts_path = layout.split_path(directory, split, "regions.txt")
        counts: np.ndarray | None = None
        if regular.is_present(counts_path):
            counts = layout.read_region_counts(counts_path, len(rows), rows.shape[1])[:: self.repeated]
        ids_path = layout.split_path(directory, split, "ids.txt")
        image_ids: list[str] | None = None
        if regular.is_present(ids_path):
            image_ids = layout.read_ids(ids_path, len(features), self.repeated, caption_image)
        tags_path = layout.split_path(directory, split, "tags.txt")
        tags: list[str] | None = None
        if regular.is_present(tags_path):
            tags = layout.read_tags(tags_path, len(features), self.repeated)

        self._counts = counts
        self._kept: np.ndarray | None = None
        boxes = self._read_boxes(rows)
        if max_images is not None and max_images < len(features):
            self._kept = kept = np.flatnonzero(caption_image < max_images)
            captions, caption_image = [captions[index] for index in kept], caption_image[kept]
            features, image_ids = features[:max_images], image_ids and image_ids[:max_images]
            tags = None if tags is None else tags[:max_images]
            kept_regions = max_images * rows.shape[1] if counts is None else int(counts[:max_images].sum())
            boxes = None if boxes is None else boxes[:kept_regions]
            self._counts = counts = None if counts is None else counts[:max_images]
        super().__init__(
            features,
            captions,
            caption_image,
            vocabulary,
            image_ids=image_ids,
            region_counts=counts,
            tags=tags,
            boxes=boxes,
            name=str(self.features_path),
        )

    def _match(self, rows: np.memmap, n_captions: int) -> tuple[np.ndarray, int]:
        """Return the image of each caption, and how often the file stores each image."""
        cap2im = layout.split_path(self.directory, self.split, "cap2im.txt")
        if regular.is_present(cap2im):
            return layout.read_caption_image(cap2im, len(rows), n_captions), 1
        stride = layout.match_counts(self.directory, self.split, rows, n_captions)
        return np.arange(n_captions, dtype=np.int64) // layout.CAPTIONS_PER_IMAGE, stride

    def _read_boxes(self, rows: np.memmap) -> np.ndarray | None:
        """Return the boxes (N, 4) of all regions, if there are any."""
        path = layout.split_path(self.directory, self.split, "boxes.npy")
        if not regular.is_present(path):
            return None
        return read_boxes(path, len(rows), rows.shape[1], self._counts, self.repeated)

    def check_caption_lengths(self, longest: int | None) -> None:
        """Raise ValueError if a caption has more than `longest` tokens; None allows any length."""
        if longest is None or not len(self) or int(self.caption_lengths.max()) <= longest:
            return
        worst = int(self.caption_lengths.argmax())
        raise ValueError(
            f"{self._place_of_caption(worst)}: expected at most {longest} tokens in a caption, as many as the model "
            f"reads, got {self.caption_lengths[worst]}: {shown(self.captions[worst])}; {self.length_advice}"
        )

    def _place_of_caption(self, caption: int) -> str:
        """Return the file and the line of a caption, for messages."""
        line = caption if self._kept is None else int(self._kept[caption])
        return f"{layout.split_path(self.directory, self.split, 'caps.txt')}: line {line + 1}"

    def warn_of_rare_words(self, min_count: int, source: Path | None = None) -> None:
        """Warn if a vocabulary built from these captions leaves out many of their words, as on small data.

        Args:
            min_count: the minimum occurrences of a word in the vocabulary.
            source: what the captions were read from; None: the folder.
        """
        if self.unknown_share > MAX_RARE_SHARE:
            warnings.warn(
                f"{source or self.directory}: the vocabulary leaves out {self.unknown_share:.0%} of the words in the "
                f"captions of {self.split}, as each occurs fewer than --min-count {min_count} times; a lower "
                "--min-count keeps more",
                stacklevel=2,
            )

    def place_of(self, image: int) -> str:
        """Return the file and the row of an image, for messages."""
        return f"{self.name}: row {self._row(image)}"

    @property
    def length_advice(self) -> str:
        """What to do about captions that are too long."""
        return "shorten it or leave it out"

    @property
    def zeros_advice(self) -> str:
        """What to do about regions of zeros."""
        return layout.zeros_advice(self.split)

    @property
    def tags_advice(self) -> str:
        return f"write {self.split}_tags.txt, one line per image"

    @property
    def boxes_advice(self) -> str:
        return f"write {self.split}_boxes.npy, (images, regions, 4) shares of the picture's sides"

    def features_digest(self) -> str:
        """Return a digest that identifies the features: SHA-256 of the file's size and of sampled blocks."""
        digest = sampled_sha256(self.features_path)
        counts = layout.split_path(self.directory, self.split, "regions.txt")
        return digest if self._counts is None else sha256_of_parts(digest.encode(), regular.read_bytes(counts))

    def reopened(self) -> Features:
        """Return the features through a new memory map of the file."""
        rows = layout.open_features(self.features_path)[:: self.repeated][: self.n_images]
        return self._source(rows, self._counts)

    def _row(self, image: int) -> int:
        return image * self.repeated

    def __repr__(self) -> str:
        size = f"{self.n_images} images, {len(self)} captions"
        return f"PrecomputedDataset({str(self.directory)!r}, {self.split!r}: {size})"

    def __getstate__(self) -> dict[str, Any]:
        # Pickling a memory map would copy the whole file; a worker process maps the file again instead.
        return {name: value for name, value in self.__dict__.items() if name not in ("features", "source")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.features = layout.open_features(self.features_path)[:: self.repeated][: self.n_images]
        self.source = self._source(self.features, self._counts)
