"""Raw patches of pictures to region embeddings."""

from __future__ import annotations

import math

from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.image_encoder import as_regions
from itm_fast.nn.normalization import l2norm

__all__ = ["PatchEncoder"]

CHANNELS = 3
_WIDTHS = (32, 64, 128)


class PatchEncoder(nn.Module):
    """A small convolutional network over a picture that comes cut into square patches; a patch is a region.

    Features of a detector know what they show, raw pixels do not: this stands in for the detector where the "features"
    are the pixels themselves. The patches are put together again, and convolutions whose strides multiply to the
    patch's side give one embedding per patch, which has seen its surroundings.

    Args:
        feature_dim: values per patch, rows x columns x 3 colours; the patch is square.
        embed_dim: width d of the embeddings.
        no_imgnorm: leave the l2 normalisation out.
    """

    def __init__(self, feature_dim: int, embed_dim: int, *, no_imgnorm: bool = False) -> None:
        super().__init__()
        self.side = math.isqrt(feature_dim // CHANNELS)
        if self.side * self.side * CHANNELS != feature_dim:
            raise ValueError(f"feature_dim: expected the values of a square patch of 3 colours, got {feature_dim}")
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
        """`features` (n, k, f), or Fragments of equally many patches an image, to Fragments of rows (n * k, d).

        The k patches of a picture are a square grid, row by row.
        """
        return self._encoded(features, self.layers, self.embed_dim, normalize=not self.no_imgnorm)

    def neighbourhoods(self, features: Tensor | Fragments) -> Fragments:
        """As `forward`, but what the last convolution sees of each patch: rows (n * k, `neighbourhood_dim`).

        That convolution is a linear layer over them.
        """
        below = nn.Sequential(*list(self.layers)[:-1], nn.Unfold(3, padding=1))
        return self._encoded(features, below, self.neighbourhood_dim, normalize=False)

    def _encoded(self, features: Tensor | Fragments, layers: nn.Module, dim: int, *, normalize: bool) -> Fragments:
        patches = as_regions(features, self.side * self.side * CHANNELS)
        n_images, grid = len(patches), math.isqrt(patches.max_length)
        if grid * grid * n_images != patches.values.shape[0]:
            raise ValueError(
                "features: expected a square grid of equally many patches in each image, "
                f"got {patches.values.shape[0]} patches in {n_images} images, at most {patches.max_length} in one"
            )
        if n_images * grid == 0:
            return patches.with_values(patches.values.new_zeros(0, dim))
        pictures = patches.values.reshape(n_images, grid, grid, self.side, self.side, CHANNELS)
        pictures = pictures.permute(0, 5, 1, 3, 2, 4).reshape(n_images, CHANNELS, grid * self.side, grid * self.side)
        embedded = layers(pictures).flatten(2).transpose(1, 2).reshape(n_images * grid * grid, -1)
        return patches.with_values(l2norm(embedded) if normalize else embedded)


def _factors(number: int) -> list[int]:
    """The prime factors of `number`, the largest first: a large first stride leaves the fewest pixels to the rest."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors[::-1]
