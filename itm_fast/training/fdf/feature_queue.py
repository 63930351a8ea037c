"""Earlier batches that FDF's realignment keeps between steps and in the state of a run.

Inside: `QueuedBatch`, which holds base features; `QueuedInputs`, which holds the inputs of the extractors;
`read_queue`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from itm_fast.data import Batch
from itm_fast.files.messages import shown
from itm_fast.fragments import Fragments
from itm_fast.models import FDF
from itm_fast.models.weights_file import check_finite
from itm_fast.training.scenario import Sets

__all__ = ["QueuedBatch", "QueuedInputs", "read_queue"]

# Dtypes of features in training, with and without autocast.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@attrs.frozen(eq=False)
class QueuedBatch:
    """Base features of a batch, without gradient.

    images: rows (R, f). captions: rows (Q, t). image_index: (n,) int64, the row of each image in the training data.
    from_data: whether the regions equal those in the data, so that a state needs only `image_index`.
    """

    images: Fragments
    captions: Fragments
    image_index: Tensor
    from_data: bool

    @classmethod
    def of(
        cls,
        batch: Batch,
        images: Fragments,
        captions: Fragments,
        *,
        from_data: bool,
        image_index: Tensor,
        whole: Callable[[Sets], Sets],
    ) -> QueuedBatch:
        """Keep the batch of a step as its base features.

        Args:
            batch: this process's part of the batch.
            images, captions: the base features of `batch`.
            from_data: whether its regions are those of the data, unchanged.
            image_index: (n,) int64, the images of the whole batch.
            whole: collects the base features of all parts, without gradient.
        """
        # Base features that no network computes are a view of the batch's regions.
        regions = batch.features.values if isinstance(batch.features, Fragments) else batch.features
        unchanged = from_data and images.values.data_ptr() == regions.data_ptr()
        return cls(whole(images), whole(captions), image_index, unchanged)

    def to(self, device: torch.device) -> QueuedBatch:
        """Move the batch to `device`."""
        return QueuedBatch(
            self.images.to(device), self.captions.to(device), self.image_index.to(device), self.from_data
        )

    def base(self, _: FDF) -> tuple[Fragments, Fragments]:
        """Return the base features of images and captions."""
        return self.images, self.captions

    def state(self) -> dict[str, Tensor]:
        """Return the tensors from which `read_queue` restores the batch."""
        images = {} if self.from_data else {"images": self.images.values, "image_offsets": self.images.offsets}
        return {
            "image_index": self.image_index,
            "captions": self.captions.values,
            "caption_offsets": self.captions.offsets,
            **images,
        }


@attrs.frozen(eq=False)
class QueuedInputs:
    """The inputs of a batch, for base features from the extractors of a later step.

    regions: (n, k, f), or Fragments of rows (R, f). token_ids: (n, L) int64, padded. lengths: (n,) int64. image_index
    and from_data: as in `QueuedBatch`.
    """

    regions: Tensor | Fragments
    token_ids: Tensor
    lengths: Tensor
    image_index: Tensor
    from_data: bool

    @classmethod
    def of(cls, batch: Batch, *, from_data: bool, image_index: Tensor, whole: Callable[[Sets], Sets]) -> QueuedInputs:
        """Keep the inputs of the batch of a step; the arguments are those of `QueuedBatch.of`."""
        lengths: Tensor = whole(batch.lengths)
        longest = int(lengths.max())
        # Each process pads to the longest of its own captions.
        own = torch.nn.functional.pad(batch.token_ids, (0, max(longest - batch.token_ids.shape[1], 0)))
        return cls(whole(batch.features), whole(own[:, :longest]), lengths, image_index, from_data)

    def to(self, device: torch.device) -> QueuedInputs:
        """Move the batch to `device`."""
        tensors = (self.token_ids.to(device), self.lengths.to(device), self.image_index.to(device))
        return QueuedInputs(self.regions.to(device), *tensors, self.from_data)

    def base(self, model: FDF) -> tuple[Fragments, Fragments]:
        """Compute the base features of images and captions in the model's current mode.

        In training, batch normalisation uses the statistics of the batch. Running statistics do not change.
        """
        # Copies take the statistics: a backward could not go through the originals once another batch changes them.
        own = [(part, name, buffer) for part in model.modules() for name, buffer in part.named_buffers(recurse=False)]
        for part, name, buffer in own:
            setattr(part, name, buffer.clone())
        try:
            return model.base_images(self.regions), model.base_captions(self.token_ids, self.lengths)
        finally:
            for part, name, buffer in own:
                setattr(part, name, buffer)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors from which `read_queue` restores the batch."""
        state = {"image_index": self.image_index, "token_ids": self.token_ids, "lengths": self.lengths}
        if self.from_data:
            return state
        regions = self.regions if isinstance(self.regions, Fragments) else Fragments.from_padded(self.regions)
        return {**state, "images": regions.values, "image_offsets": regions.offsets}


def read_queue(
    state: Any,
    *,
    expected: int,
    batch_size: int,
    widths: tuple[int, int],
    words: int | None,
    image_rows: Callable[[Tensor], Tensor | Fragments] | None,
) -> list[QueuedBatch | QueuedInputs]:
    """Return the batches in the entry `scenario` of a state, the latest first.

    Args:
        state: the entry as read from the file.
        expected: the expected number of batches.
        batch_size: the maximum number of pairs in a batch.
        widths: widths of the base features of images and captions; with `words`, the first is the width of the regions.
        words: vocabulary size, for `QueuedInputs`; None for `QueuedBatch`.
        image_rows: returns the regions of images by their rows in the training data; None if states contain them.

    Raises:
        ValueError: an entry is missing, damaged or inconsistent. The message names it.
    """
    name = "scenario.queue"
    queue = state.get("queue") if isinstance(state, dict) else None
    if not isinstance(queue, list):
        raise ValueError(f"{name}: expected a list of batches, got {shown(queue)}")
    if len(queue) != expected:
        raise ValueError(f"{name}: expected {expected} batches, got {len(queue)}")
    return [_read(kept, f"{name}.{index}", batch_size, widths, words, image_rows) for index, kept in enumerate(queue)]


def _read(
    kept: Any,
    name: str,
    batch_size: int,
    widths: tuple[int, int],
    words: int | None,
    image_rows: Callable[[Tensor], Tensor | Fragments] | None,
) -> QueuedBatch | QueuedInputs:
    captions = {"captions", "caption_offsets"} if words is None else {"token_ids", "lengths"}
    required, of_images = {"image_index", *captions}, {"images", "image_offsets"}
    if not isinstance(kept, dict) or set(kept) not in (required, required | of_images):
        wanted = "captions" if words is None else "token_ids, lengths"
        raise ValueError(f"{name}: expected image_index, {wanted} and images, got {shown(kept)}")
    index = kept["image_index"]
    _check_index(index, f"{name}.image_index", batch_size)
    from_data = "images" not in kept
    if not from_data:
        images: Tensor | Fragments = _sets(
            kept["images"], kept["image_offsets"], len(index), widths[0], f"{name}.images"
        )
    elif image_rows is None:
        raise ValueError(f"{name}.images: missing; they cannot be read from the data, because training changed them")
    else:
        images = image_rows(index)
    if words is not None:
        _check_tokens(kept["token_ids"], kept["lengths"], len(index), words, name)
        return QueuedInputs(images, kept["token_ids"], kept["lengths"], index, from_data)
    rows = images if isinstance(images, Fragments) else Fragments.from_padded(images)
    sets = _sets(kept["captions"], kept["caption_offsets"], len(index), widths[1], f"{name}.captions")
    return QueuedBatch(rows, sets, index, from_data)


def _check_index(index: Any, name: str, batch_size: int) -> None:
    if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.dim() != 1:
        raise ValueError(f"{name}: expected an int64 tensor of one dimension, got {shown(index)}")
    if len(index) and int(index.min()) < 0:
        raise ValueError(f"{name}: expected numbers of images, got {int(index.min())}")
    if not 1 <= len(index) <= batch_size:
        raise ValueError(f"{name}: expected 1 to {batch_size} images, got {len(index)}")


def _check_tokens(token_ids: Any, lengths: Any, count: int, words: int, name: str) -> None:
    for what, tensor, dims in (("token_ids", token_ids, 2), ("lengths", lengths, 1)):
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64 or tensor.dim() != dims:
            raise ValueError(f"{name}.{what}: expected an int64 tensor of {dims} dimension(s), got {shown(tensor)}")
        if len(tensor) != count:
            raise ValueError(f"{name}.{what}: expected {count} captions, got {len(tensor)}")
    if not token_ids.numel() or int(token_ids.min()) < 0 or int(token_ids.max()) >= words:
        raise ValueError(f"{name}.token_ids: expected numbers from 0 to {words - 1}")
    if int(lengths.min()) < 1 or int(lengths.max()) > token_ids.shape[1]:
        raise ValueError(f"{name}.lengths: expected numbers from 1 to {token_ids.shape[1]}")


def _sets(values: Any, offsets: Any, count: int, width: int, name: str) -> Fragments:
    try:
        sets = Fragments(values, offsets)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
    if values.dtype not in _DTYPES:
        raise ValueError(f"{name}: expected {' or '.join(map(str, _DTYPES))}, got {values.dtype}")
    if len(sets) != count or values.shape[1] != width:
        raise ValueError(f"{name}: expected {count} sets of width {width}, got {len(sets)} of width {values.shape[1]}")
    check_finite(values, name)
    return sets
