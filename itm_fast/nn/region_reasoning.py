"""What VSRN does with the regions of an image: relations between them, then one vector read from all.

Inside: `RegionReasoning`, `RegionReader`.

Source: Li et al., "Visual Semantic Reasoning for Image-Text Matching" (ICCV 2019), sections 3.2 and 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.packing import Packing
from itm_fast.nn.pooling import final_states
from itm_fast.nn.residual_image_encoder import RowNorm

__all__ = ["RegionReader", "RegionReasoning"]


class RegionReasoning(nn.Module):
    """One layer of region relationship reasoning: a graph convolution over all regions of an image, with a residual.

    `V + BN(W_r ((theta(V) phi(V)^T / K) g(V)))` (Eqs 2 to 4) for the K regions V of an image, where the affinities are
    divided by K, as the public code does, and no softmax is taken. The batch normalisation, over the regions of all
    images, starts with a weight of zero, so that a fresh layer is the identity. `theta`, `phi`, `g` and `W_r` are
    linear with a bias.

    Args:
        dim: width D of the regions, which none of the linear layers changes.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.theta, self.phi, self.g, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm = RowNorm(dim)
        nn.init.zeros_(self.norm.weight)

    def forward(self, regions: Fragments) -> Fragments:
        """Regions of rows (N, D) to as many of the same width; an image without regions has none after it."""
        # What pads an image to the longest is zero in all three, and so neither has affinities nor a message.
        theta, phi, g = (_padded(regions, layer(regions.values)) for layer in (self.theta, self.phi, self.g))
        affinities = torch.bmm(theta, phi.transpose(1, 2)) / regions.lengths.clamp(min=1)[:, None, None]
        messages = _rows(regions, torch.bmm(affinities, g))
        return regions.with_values(regions.values + self.norm(self.out(messages)))


class RegionReader(nn.Module):
    """Global semantic reasoning: a GRU reads the regions of an image in their order and ends in the image's vector.

    Args:
        dim: width D of the regions and of the vector.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(dim, dim)

    def forward(self, regions: Fragments) -> Tensor:
        """Regions of rows (N, D) in n sets to (n, D); zero for an image without regions."""
        packing = Packing(regions.lengths, regions.device)
        if packing.n_rows == 0:
            return regions.values.new_zeros(len(regions), regions.values.shape[1])
        return final_states(packing.unpack(self.rnn(packing.pack(regions.values))[0].data))


def _is_full(regions: Fragments) -> bool:
    """Whether all images have equally many regions, so that a padded form is the same memory."""
    return regions.values.shape[0] == len(regions) * regions.max_length


def _padded(regions: Fragments, values: Tensor) -> Tensor:
    if _is_full(regions):
        return values.reshape(len(regions), regions.max_length, values.shape[1])
    return regions.with_values(values).to_padded()[0]


def _rows(regions: Fragments, padded: Tensor) -> Tensor:
    if _is_full(regions):
        return padded.reshape(regions.values.shape[0], padded.shape[2])
    sets = regions.set_index()
    return padded[sets, torch.arange(regions.values.shape[0], device=sets.device) - regions.offsets[sets]]
