"""Batches of images as region features and captions as token ids.

Inside: `Batch`, `CaptionDataset`, `encode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from itm_fast.data.features import ArrayFeatures, Features, ResidentFeatures
from itm_fast.data.picture_augmentation import PictureAugmentation
from itm_fast.data.tagged_images import TaggedImages
from itm_fast.data.vocabulary import Vocabulary
from itm_fast.files.documents import check_characters
from itm_fast.fragments import Fragments

Indices = Tensor | np.ndarray | Sequence[int]

# Mixed with the seed, so that noise differs from the order of the batches of any epoch, which two numbers seed.
_NOISE = (0, 0x4E)


@attrs.frozen(eq=False)
class Batch:
    """n captions, each with its image.

    Attributes:
        features: (n, k, f) of the source's `batch_dtype`, or Fragments of rows (N, f) if images differ in regions; with
            boxes (n, k, f + 4) or (N, f + 4), float32; with object tags `TaggedImages` of these.
        token_ids: (n, L) int64, padded with the vocabulary's `<pad>`.
        lengths: (n,) int64, including `<start>` and `<end>`.
        image_index, caption_index: (n,) int64, the image and the caption in the split.
    """

    features: Any  # Tensor | Fragments | TaggedImages
    token_ids: Tensor
    lengths: Tensor
    image_index: Tensor
    caption_index: Tensor

    def __len__(self) -> int:
        return len(self.caption_index)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Copy the batch to `device`."""
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in self._parts()))

    def pin_memory(self) -> Batch:
        """Copy the batch to page-locked memory; `torch.utils.data.DataLoader(pin_memory=True)` calls this.

        Tensors on other devices stay there, and page-locked tensors are not copied.
        """
        return Batch(*(part.pin_memory() if part.device.type == "cpu" else part for part in self._parts()))

    def repeated(self, times: int) -> Batch:
        """Return each item `times` times, side by side."""
        items = torch.arange(len(self)).repeat_interleave(times)
        return Batch(*(_items_of(part, items) for part in self._parts()))

    def _parts(self) -> tuple[Any, ...]:
        return self.features, self.token_ids, self.lengths, self.image_index, self.caption_index


def _items_of(part: Any, items: Tensor) -> Any:
    if isinstance(part, TaggedImages):
        tags = (tensor[items.to(tensor.device)] for tensor in (part.tag_ids, part.tag_lengths))
        return TaggedImages(_items_of(part.regions, items), *tags)
    return part.index_select(items) if isinstance(part, Fragments) else part[items.to(part.device)]


class CaptionDataset:
    """Images with any number of captions each, from arrays. An item is a caption.

    Args:
        features: (n_images, k, f) floats, or `Features`. A memory map stays on disk.
        captions: n_captions texts. The constructor turns them into token ids.
        caption_image: (n_captions,) integers, the image of each caption.
        vocabulary: gives the token ids.
        image_ids: a name for each image, or None.
        region_counts: (n_images,) int64, how many of the k regions each image has; batches then contain Fragments.
            None: all regions.
        token_ids: the ids of all captions (int32, end to end) and the length of each caption (int64), if known.
        tags: the object tags of each image as text ("" for none), or None.
        boxes: (N, 4) float32, the boxes of the regions of all images end to end, or None; see the method `boxes`.
        name: the name of the features in messages about a row.

    Attributes:
        features, captions, vocabulary, image_ids, tags, name: the arguments.
        reads_tags: whether batches contain the object tags, after `read_tags`.
        reads_boxes: whether batches contain the boxes of the regions, after `read_boxes`.
        caption_image: (n_captions,) int64 tensor.
        token_ids: int32 tensor, the ids of all captions end to end.
        caption_lengths: (n_captions,) int64 tensor.
        n_images: the number of images; `len()` is the number of captions.
        source: the `Features` that batches are read from. It may be replaced by a source of the same features.
        box_source: the boxes of the regions as `ResidentFeatures` of four channels, or None.

    Raises:
        ValueError: the arguments do not fit each other.
    """

    def __init__(
        self,
        features: np.ndarray | Features,
        captions: Sequence[str],
        caption_image: Indices,
        vocabulary: Vocabulary,
        *,
        image_ids: Sequence[str] | None = None,
        region_counts: np.ndarray | None = None,
        token_ids: tuple[Tensor, Tensor] | None = None,
        tags: Sequence[str] | None = None,
        boxes: np.ndarray | None = None,
        name: str = "features",
    ) -> None:
        if isinstance(features, np.ndarray) and (features.ndim != 3 or features.dtype.kind != "f"):
            raise ValueError(
                f"{name}: expected floats of shape (images, regions, channels), got {features.dtype} {features.shape}"
            )
        if image_ids is not None and len(image_ids) != len(features):
            raise ValueError(f"image_ids: expected one name per image ({len(features)}), got {len(image_ids)}")
        if tags is not None and len(tags) != len(features):
            raise ValueError(f"tags: expected one text per image ({len(features)}), got {len(tags)}")
        self.features, self.captions, self.vocabulary, self.name = features, list(captions), vocabulary, name
        self.image_ids = None if image_ids is None else list(image_ids)
        self.tags = None if tags is None else list(tags)
        self._tag_ids: list[Tensor] | None = None
        self.reads_boxes = False
        self.n_images = len(features)
        self.source = self._source(features, region_counts)
        self.box_source = self._box_source(boxes)
        self.caption_image = torch.from_numpy(_as_indices(caption_image, len(features), "caption_image"))
        if len(self.caption_image) != len(self.captions):
            raise ValueError(
                f"caption_image: expected one image per caption ({len(self.captions)}), got {len(self.caption_image)}"
            )
        self.token_ids, self.caption_lengths = token_ids or encode(self.captions, vocabulary)
        self._offsets = torch.zeros(len(self.captions) + 1, dtype=torch.int64)
        torch.cumsum(self.caption_lengths, 0, out=self._offsets[1:])

    def _source(self, features: np.ndarray | Features, region_counts: np.ndarray | None) -> Features:
        if isinstance(features, Features):
            return features
        return ArrayFeatures(features, self.name, region_counts, self._row)

    def _box_source(self, boxes: np.ndarray | None) -> ResidentFeatures | None:
        if boxes is None:
            return None
        images, regions, _ = self.source.shape
        expected = self.source.n_regions, 4
        if boxes.dtype != np.float32 or boxes.shape != expected:
            raise ValueError(f"boxes: expected float32 of shape {expected}, got {boxes.dtype} {boxes.shape}")
        return ResidentFeatures(torch.from_numpy(boxes), (images, regions, 4), self.source.counts, torch.device("cpu"))

    def __len__(self) -> int:
        return len(self.captions)

    def shuffle_captions(self, share: float, seed: int) -> None:
        """Give a share of the captions the image of another one of them: noisy correspondence.

        The images of `int(share * n)` captions are permuted at random; a few captions may keep theirs. Source: Huang et
        al., "Learning with Noisy Correspondence for Cross-modal Matching" (NeurIPS 2021).

        Args:
            share: from 0 to below 1.
            seed: the same seed gives the same captions.

        Raises:
            ValueError: the share is out of bounds.
        """
        if not 0 <= share < 1:
            raise ValueError(f"noise: expected a share from 0 to below 1, got {share}")
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *_NOISE])))
        chosen = torch.from_numpy(random.permutation(len(self))[: int(share * len(self))])
        self.caption_image = self.caption_image.clone()
        self.caption_image[chosen] = self.caption_image[chosen[torch.from_numpy(random.permutation(len(chosen)))]]

    @property
    def unknown_share(self) -> float:
        """Share of the captions' words that the vocabulary lacks, from 0 to 1."""
        words = len(self.token_ids) - sum(self.vocabulary.marks) * len(self)
        return int((self.token_ids == self.vocabulary.unk).sum()) / words if words else 0.0

    def region_count(self, image: int) -> int:
        """Return the number of regions of an image."""
        counts = self.source.counts
        return self.source.shape[1] if counts is None else int(counts[image])

    def _row(self, image: int) -> int:
        """Return the row of an image in the file `name`."""
        return image

    @property
    def reads_tags(self) -> bool:
        return self._tag_ids is not None

    def read_tags(self) -> None:
        """Let batches contain the object tags, for a model that reads them.

        Raises:
            ValueError: there are no tags.
        """
        if self.tags is None:
            raise ValueError(f"{self.name}: the model reads object tags, but there are none; {self.tags_advice}")
        # The pieces and the word that ends a caption; nothing for an image without tags.
        encoded = (self.vocabulary.encode(text)[1:] if text else [] for text in self.tags)
        self._tag_ids = [torch.tensor(ids, dtype=torch.int64) for ids in encoded]

    @property
    def tags_advice(self) -> str:
        """What to do about missing tags."""
        return "pass them as tags"

    def read_boxes(self) -> None:
        """Let batches contain the boxes of the regions, for a model that reads them.

        The four edges of a box, as `boxes` returns them, follow the features of its region.

        Raises:
            ValueError: there are no boxes.
        """
        if self.box_source is None:
            raise ValueError(
                f"{self.name}: the model reads the boxes of the regions, but there are none; {self.boxes_advice}"
            )
        self.reads_boxes = True

    @property
    def boxes_advice(self) -> str:
        """What to do about missing boxes."""
        return "pass them as boxes"

    def region_batch(self, image_indices: Indices) -> Tensor | Fragments:
        """Read the features of images without boxes and tags, (n, k, f) of the source's `batch_dtype`, or Fragments.

        Raises:
            ValueError: a value is not finite, or a file has changed. The message names file and row.
        """
        return self.source.gather(_as_indices(image_indices, self.n_images, "image_indices"))

    def image_batch(self, image_indices: Indices) -> Any:
        """Read the features of images, (n, k, f) of the source's `batch_dtype`, or Fragments if they differ in regions.

        After `read_boxes` a region has four values more, in float32. After `read_tags`, these are the regions of
        `TaggedImages`.

        Raises:
            ValueError: a value is not finite, or a file has changed. The message names file and row.
        """
        images = _as_indices(image_indices, self.n_images, "image_indices")
        return self._complete(self.source.gather(images), images)

    def _complete(self, regions: Tensor | Fragments, images: np.ndarray) -> Any:
        """Add to the regions of images what the model reads beside them."""
        if self.reads_boxes:
            boxes = self.boxes(images)
            if isinstance(regions, Fragments) and isinstance(boxes, Fragments):
                regions = regions.with_values(_beside(regions.values, boxes.values))
            elif isinstance(regions, Tensor) and isinstance(boxes, Tensor):
                regions = _beside(regions, boxes)
        if self._tag_ids is None:
            return regions
        ids = [self._tag_ids[image] for image in images.tolist()]
        lengths = torch.tensor([len(one) for one in ids], dtype=torch.int64)
        padded = torch.nn.utils.rnn.pad_sequence(ids or [lengths], batch_first=True)[: len(ids)]
        return TaggedImages(regions, padded, lengths)

    def boxes(self, image_indices: Indices) -> Tensor | Fragments:
        """Return the boxes of the regions of images: left, top, right and bottom edge as shares of the picture's sides.

        Returns:
            (n, k, 4) float32 from 0 to 1, or Fragments if the images differ in regions. The order is that of
            `image_batch`.

        Raises:
            ValueError: the data contain no boxes.
        """
        if self.box_source is None:
            raise ValueError(f"{self.name}: these data contain no boxes of the regions")
        return self.box_source.gather(_as_indices(image_indices, self.n_images, "image_indices"))

    def caption_batch(self, caption_indices: Indices) -> tuple[Tensor, Tensor]:
        """Return token ids (n, L) int64, padded with the vocabulary's `<pad>`, and lengths (n,) int64."""
        wanted = torch.from_numpy(_as_indices(caption_indices, len(self), "caption_indices"))
        lengths = self.caption_lengths[wanted]
        columns = torch.arange(int(lengths.max()) if len(wanted) else 0)
        inside = columns < lengths[:, None]
        token_ids = torch.full(inside.shape, self.vocabulary.pad, dtype=torch.int64)
        token_ids[inside] = self.token_ids[(self._offsets[wanted][:, None] + columns)[inside]].to(torch.int64)
        return token_ids, lengths

    def batch(self, caption_indices: Indices, augmentation: PictureAugmentation | None = None) -> Batch:
        """Return a batch of captions and their images. An image is repeated for each of its captions.

        With `augmentation`, the picture of each caption is changed by the number of the caption.
        """
        captions = torch.from_numpy(_as_indices(caption_indices, len(self), "caption_indices"))
        token_ids, lengths = self.caption_batch(captions)
        images = self.caption_image[captions]
        if augmentation is None:
            features = self.image_batch(images)
        else:
            features = self._complete(
                self.source.augmented(images.numpy(), captions.numpy(), augmentation), images.numpy()
            )
        return Batch(features, token_ids, lengths, images, captions)


def _beside(features: Tensor, boxes: Tensor) -> Tensor:
    # float32, as the edges of a box would lose digits in 16 bits.
    return torch.cat([features.to(torch.float32), boxes.to(features.device)], dim=-1)


def encode(captions: Sequence[str], vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return the token ids of all captions, int32 end to end, and the length of each, int64.

    Raises:
        ValueError: a caption holds a lone surrogate, which cannot be written as UTF-8.
    """
    for row, caption in enumerate(captions):
        try:
            check_characters(caption)
        except ValueError as error:
            raise ValueError(f"captions: row {row}: {error}") from None
    encoded = [vocabulary.encode(caption) for caption in captions]
    lengths = torch.tensor([len(ids) for ids in encoded], dtype=torch.int64)
    return torch.tensor([index for ids in encoded for index in ids], dtype=torch.int32), lengths


def _as_indices(indices: Indices, size: int, name: str) -> np.ndarray:
    array = np.asarray(indices)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    array = array.astype(np.int64)
    if array.size and (array.min() < 0 or array.max() >= size):
        raise ValueError(f"{name}: expected values from 0 to {size - 1}, got {array.min()} to {array.max()}")
    return array
