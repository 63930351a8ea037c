"""Synthetic images for measurements of searches, with the statistics of real embeddings.

The rows of a whole picture, 36 regions of 256 channels, are one vector. Images are drawn from the normal distribution
with the mean and the covariance of this vector over all bundled emoji. So regions vary within and between pictures, and
go together, as in real ones. Recombined regions of real pictures would be near-duplicates of each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from itm_fast.data import emoji
from itm_fast.fragments import Fragments
from itm_fast.search.members import Members

__all__ = ["ImageModel", "real_images"]

_BATCH = 256


def real_images(members: Members) -> Fragments:
    """Return the embeddings of all bundled emoji by the first model."""
    pictures = torch.cat([torch.from_numpy(emoji.patches(emoji.pictures(split))) for split in emoji.SPLITS])
    return Fragments.cat([members.encode_images(part)[0] for part in pictures.split(_BATCH)])


class ImageModel:
    """A normal distribution of images: principal components of the rows of whole pictures, and independent noise.

    Args:
        real: images with equally many regions (k, d).
        components: number of principal components. The variance that they leave is that of the noise.

    Attributes:
        explained: the share of the variance in the components.
    """

    def __init__(self, real: Fragments, components: int = 512) -> None:
        self._shape = (len(real.values) // len(real), real.values.shape[1])
        rows = real.values.view(len(real), -1)
        self._mean, variance = rows.mean(0), rows.var(0, correction=0)
        torch.manual_seed(0)
        _, sizes, directions = torch.svd_lowrank(rows - self._mean, min(components, len(real)), niter=2)
        self._components = (directions * sizes / len(real) ** 0.5).t().contiguous()
        kept = self._components.square().sum(0)
        self._noise = (variance - kept).clamp(min=0).sqrt()
        self.explained = float(kept.sum() / variance.sum())

    def drawn(self, count: int, seed: int) -> Iterator[Fragments]:
        """Yield `count` images in batches, with rows of the norm 1 as the encoder makes them."""
        generator = torch.Generator().manual_seed(seed)
        for first in range(0, count, _BATCH):
            size = min(_BATCH, count - first)
            factors = torch.randn(size, len(self._components), generator=generator)
            noise = self._noise * torch.randn(size, len(self._mean), generator=generator)
            yield Fragments.from_padded(self._normal(torch.addmm(self._mean + noise, factors, self._components)))

    def _normal(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.normalize(rows.view(len(rows), *self._shape), dim=2)
