"""Base features of earlier batches, as FDF's realignment keeps them from step to step and in a run's state.

Inside: `QueuedBatch`, `read_queue`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from itm_fast.data import Batch
from itm_fast.fragments import Fragments
from itm_fast.messages import shown
from itm_fast.models.weights_file import check_finite

__all__ = ["QueuedBatch", "read_queue"]

# Of features in training, with autocast and without.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@attrs.frozen(eq=False)
class QueuedBatch:
    """Base features of a batch without gradient.

    images: rows (R, f). captions: rows (Q, t). image_index: (n,) int64, the row of each image in the training data.
    from_data: the regions stand in the data as they are, so that a state holds the rows of `image_index` alone.
    """

    images: Fragments
    captions: Fragments
    image_index: Tensor
    from_data: bool

    @classmethod
    def of(cls, batch: Batch, images: Fragments, captions: Fragments, *, from_data: bool) -> QueuedBatch:
        """The batch of a step with its base features; `from_data`: its regions are those of the data, unchanged."""
        # Base features that come from no network are a view of the batch's own regions.
        regions = batch.features.values if isinstance(batch.features, Fragments) else batch.features
        unchanged = from_data and images.values.data_ptr() == regions.data_ptr()
        return cls(images.detach(), captions.detach(), batch.image_index, unchanged)

    def to(self, device: torch.device) -> QueuedBatch:
        """The same on `device`."""
        return QueuedBatch(
            self.images.to(device), self.captions.to(device), self.image_index.to(device), self.from_data
        )

    def state(self) -> dict[str, Tensor]:
        """Tensors that `read_queue` makes it from."""
        images = {} if self.from_data else {"images": self.images.values, "image_offsets": self.images.offsets}
        return {
            "image_index": self.image_index,
            "captions": self.captions.values,
            "caption_offsets": self.captions.offsets,
            **images,
        }


def read_queue(
    state: Any,
    *,
    expected: int,
    batch_size: int,
    widths: tuple[int, int],
    image_rows: Callable[[Tensor], Tensor | Fragments] | None,
) -> list[QueuedBatch]:
    """The batches of a state's entry `scenario`, the latest first.

    Args:
        state: what was read from the file.
        expected: their number.
        batch_size: the most pairs of one.
        widths: of the base features of images and of captions.
        image_rows: the regions of images by their rows in the training data; None where a state holds them.

    Raises:
        ValueError: the entry that is missing, damaged or does not fit is named.
    """
    name = "scenario.queue"
    queue = state.get("queue") if isinstance(state, dict) else None
    if not isinstance(queue, list):
        raise ValueError(f"{name}: expected a list of batches, got {shown(queue)}")
    if len(queue) != expected:
        raise ValueError(f"{name}: expected {expected} batches, got {len(queue)}")
    return [_read(kept, f"{name}.{index}", batch_size, widths, image_rows) for index, kept in enumerate(queue)]


def _read(
    kept: Any,
    name: str,
    batch_size: int,
    widths: tuple[int, int],
    image_rows: Callable[[Tensor], Tensor | Fragments] | None,
) -> QueuedBatch:
    required, of_images = {"image_index", "captions", "caption_offsets"}, {"images", "image_offsets"}
    if not isinstance(kept, dict) or set(kept) not in (required, required | of_images):
        raise ValueError(f"{name}: expected image_index, captions and images, got {shown(kept)}")
    index = kept["image_index"]
    if not isinstance(index, Tensor) or index.dtype != torch.int64 or index.dim() != 1:
        raise ValueError(f"{name}.image_index: expected an int64 tensor of one dimension, got {shown(index)}")
    if len(index) and int(index.min()) < 0:
        raise ValueError(f"{name}.image_index: expected numbers of images, got {int(index.min())}")
    if not 1 <= len(index) <= batch_size:
        raise ValueError(f"{name}.image_index: expected 1 to {batch_size} images, got {len(index)}")
    captions = _sets(kept["captions"], kept["caption_offsets"], len(index), widths[1], f"{name}.captions")
    from_data = "images" not in kept
    if not from_data:
        images = _sets(kept["images"], kept["image_offsets"], len(index), widths[0], f"{name}.images")
    elif image_rows is None:
        raise ValueError(f"{name}.images: missing; they are not those of the data, which could be read again")
    else:
        rows = image_rows(index)
        images = rows if isinstance(rows, Fragments) else Fragments.from_padded(rows)
    return QueuedBatch(images, captions, index, from_data)


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
