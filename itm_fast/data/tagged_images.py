"""`TaggedImages`: images as regions and object tags, for models that read both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree

from itm_fast.fragments import Fragments

__all__ = ["TaggedImages"]


@attrs.frozen(eq=False)
class TaggedImages:
    """n images.

    Attributes:
        regions: (n, k, f), or Fragments of n sets.
        tag_ids: (n, T) int64, the pieces of the tags and `[SEP]`, padded anyhow.
        tag_lengths: (n,) int64; 0: no tags.
    """

    regions: Tensor | Fragments
    tag_ids: Tensor
    tag_lengths: Tensor

    def __len__(self) -> int:
        return len(self.tag_lengths)

    @property
    def device(self) -> torch.device:
        return self.regions.device

    def with_regions(self, regions: Tensor | Fragments) -> TaggedImages:
        """Return the same tags with other regions."""
        return TaggedImages(regions, self.tag_ids, self.tag_lengths)

    def to(self, *args: Any, **options: Any) -> TaggedImages:
        """Apply `Tensor.to` to the regions. Tags move to the same device and keep their type."""
        regions = self.regions.to(*args, **options)
        moved = (one.to(regions.device) for one in (self.tag_ids, self.tag_lengths))
        return TaggedImages(regions, *moved)

    def pin_memory(self) -> TaggedImages:
        """Copy to page-locked memory."""
        return TaggedImages(self.regions.pin_memory(), self.tag_ids.pin_memory(), self.tag_lengths.pin_memory())


def _flatten(images: TaggedImages) -> tuple[list[Any], Any]:
    return [images.regions, images.tag_ids, images.tag_lengths], None


def _unflatten(children: Iterable[Any], _context: Any) -> TaggedImages:
    return TaggedImages(*children)


_pytree.register_pytree_node(TaggedImages, _flatten, _unflatten, serialized_type_name="itm_fast.TaggedImages")
