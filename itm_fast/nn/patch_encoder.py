"""Encode raw image patches as regions."""

from __future__ import annotations

import math

from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.image_encoder import as_regions
from itm_fast.nn.no_rows import connected
from itm_fast.nn.normalization import l2norm
from itm_fast.reference import validation

__all__ = ["PatchEncoder"]

CHANNELS = 3
_WIDTHS = (32, 64, 128)


class PatchEncoder(nn.Module):
    """Encode an image that is cut into square patches by a small convolutional network; each patch is a region.

    Use it if the features are raw pixels instead of detector features. The patches are joined to the image again.
    The strides of the convolutions multiply to the side of a patch, so that each patch gets one embedding, which also
    depends on its surroundings.

    Args:
        feature_dim: values per patch, rows x columns x 3 colours; the patch is square.
        embed_dim: width d of the embeddings.
        no_imgnorm: leave the l2 normalisation out.

    Raises:
        ValueError: a size is not a whole number of at least 1.
    """

    def __init__(self, feature_dim: int, embed_dim: int, *, no_imgnorm: bool = False) -> None:
        super().__init__()
        validation.check_sizes(feature_dim=feature_dim, embed_dim=embed_dim)
        self.side = patch_side(feature_dim)
        self.embed_dim, self.no_imgnorm = embed_dim, no_imgnorm
        layers: list[nn.Module] = [nn.BatchNorm2d(CHANNELS, affine=False)]
        width = CHANNELS
        for index, stride in enumerate(_factors(self.side)):
            wider = _WIDTHS[min(index, len(_WIDTHS) - 1)]
            kernel = 5 if index == 0 else 3
            layers += [
                nn.Conv2d(width, wider, kernel, stride, kernel // 2, bias=False),
                nn.BatchNorm2d(wider),
                nn.ReLU(),
            ]
            width = wider
        # Of a patch and its eight neighbours.
        self.neighbourhood_dim = 9 * width
        layers.append(nn.Conv2d(width, embed_dim, 3, padding=1))
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor | Fragments) -> Fragments:
        """Encode (n, k, f), or Fragments with the same number of patches per image, as Fragments of rows (n * k, d).

        The k patches of an image are a square grid, row by row.
        """
        return self._encoded(features, self.layers, self.embed_dim, normalize=not self.no_imgnorm)

    def neighbourhoods(self, features: Tensor | Fragments) -> Fragments:
        """Return the input of the last convolution for each patch: rows (n * k, `neighbourhood_dim`).

        The last convolution is a linear layer on these rows.
        """
        below = nn.Sequential(*list(self.layers)[:-1], nn.Unfold(3, padding=1))
        return self._encoded(features, below, self.neighbourhood_dim, normalize=False)

    def _encoded(self, features: Tensor | Fragments, layers: nn.Module, dim: int, *, normalize: bool) -> Fragments:
        pictures = as_pictures(features, self.side)
        patches = as_regions(features, self.side * self.side * CHANNELS)
        if pictures.numel() == 0:
            return patches.with_values(connected(patches.values.new_zeros(0, dim), layers.parameters()))
        embedded = layers(pictures).flatten(2).transpose(1, 2).reshape(len(patches.values), -1)
        return patches.with_values(l2norm(embedded) if normalize else embedded)


def patch_side(feature_dim: int) -> int:
    """Return the pixels per side of a square patch with `feature_dim` values; ValueError if there is none."""
    side = math.isqrt(feature_dim // CHANNELS)
    if side * side * CHANNELS != feature_dim:
        raise ValueError(f"feature_dim: expected the values of a square patch of 3 colours, got {feature_dim}")
    return side


def as_pictures(features: Tensor | Fragments, side: int) -> Tensor:
    """Join patches of `side` x `side` pixels, a square grid per picture, to pictures (n, 3, height, width).

    Raises:
        ValueError: the patches of a picture are no square grid, or pictures differ in their number.
    """
    patches = as_regions(features, side * side * CHANNELS)
    n_images, grid = len(patches), math.isqrt(patches.max_length)
    if grid * grid * n_images != patches.values.shape[0]:
        raise ValueError(
            "features: expected a square grid of equally many patches in each image, "
            f"got {patches.values.shape[0]} patches in {n_images} images, at most {patches.max_length} in one"
        )
    pictures = patches.values.reshape(n_images, grid, grid, side, side, CHANNELS)
    return pictures.permute(0, 5, 1, 3, 2, 4).reshape(n_images, CHANNELS, grid * side, grid * side)


def _factors(number: int) -> list[int]:
    """Return the prime factors in descending order: a large first stride leaves few pixels to the later layers."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors[::-1]
