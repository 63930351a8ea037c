"""Find regions whose features are all zero: padding that nothing declares as such, or blank pictures.

Inside: `count_zeros`, `warn_of_zeros`.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from itm_fast.data.dataset import Batch
from itm_fast.data.precomputed import PrecomputedDataset
from itm_fast.data.tagged_images import TaggedImages
from itm_fast.fragments import Fragments

__all__ = ["count_zeros", "warn_of_zeros"]


def count_zeros(features: Tensor | Fragments | TaggedImages) -> Tensor:
    """Count the regions of each image whose features are all zero.

    Args:
        features: (n, k, f), Fragments of n images, or `TaggedImages`, on any device.

    Returns:
        (n,) int64 on the CPU.
    """
    if isinstance(features, TaggedImages):
        features = features.regions
    if not isinstance(features, Fragments):
        return (~features.any(2)).sum(1).cpu()
    zero = (~features.values.any(1)).cpu()
    owner = torch.repeat_interleave(features.lengths.cpu())
    return torch.bincount(owner, weights=zero, minlength=len(features)).to(torch.int64)


def warn_of_zeros(data: PrecomputedDataset, batch: Batch) -> None:
    """Warn if images of a batch have regions of zeros, and name the first such image."""
    features = batch.features
    if data.reads_boxes:
        # The last four values are the box.
        split = isinstance(features, Fragments)
        features = features.with_values(features.values[:, :-4]) if split else features[..., :-4]
    images = dict(zip(batch.image_index.tolist(), count_zeros(features).tolist(), strict=True))
    padded = [image for image, zeros in images.items() if zeros]
    if padded:
        first = min(padded)
        warnings.warn(
            f"{data.place_of(first)}: {images[first]} of {data.region_count(first)} regions are zeros, as are regions "
            f"of {len(padded)} of the {len(images)} images in the first batch; {data.zeros_advice}",
            stacklevel=2,
        )
