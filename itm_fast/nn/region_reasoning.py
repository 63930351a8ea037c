"""VSRN's reasoning over the regions of an image: relations between regions, then one vector for all.

Inside: `RegionReasoning`, `RegionReader`.

Source: Li et al., "Visual Semantic Reasoning for Image-Text Matching" (ICCV 2019), sections 3.2 and 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.no_rows import connected
from itm_fast.nn.packing import Packing, padded_rows, rows_of_padded
from itm_fast.nn.pooling import final_states
from itm_fast.nn.residual_image_encoder import RowNorm
from itm_fast.ops.library import outside_graphs
from itm_fast.reference import validation

__all__ = ["RegionReader", "RegionReasoning"]


class RegionReasoning(nn.Module):
    """Apply one layer of region relationship reasoning: a residual graph convolution over the regions of an image.

    `V + BN(W_r ((theta(V) phi(V)^T / K) g(V)))` (Eqs 2 to 4) for the K regions V of an image. The affinities are
    divided by K, without a softmax, as in the official code. The batch normalisation over the regions of all images
    starts with a weight of zero, so that a new layer is the identity. `theta`, `phi`, `g` and `W_r` are
    linear with a bias.

    Args:
        dim: width D of the regions, input and output of all linear layers.

    Raises:
        ValueError: a size is not a whole number of at least 1.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        validation.check_sizes(dim=dim)
        self.theta, self.phi, self.g, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm = RowNorm(dim)
        nn.init.zeros_(self.norm.weight)

    def forward(self, regions: Fragments) -> Fragments:
        """Map regions (N, D) to regions (N, D). An image without regions stays empty."""
        validation.check_fragments("regions", regions)
        # What pads an image to the longest is zero in all three, and so neither has affinities nor a message.
        theta, phi, g = (padded_rows(regions, layer(regions.values)) for layer in (self.theta, self.phi, self.g))
        affinities = torch.bmm(theta, phi.transpose(1, 2)) / regions.lengths.clamp(min=1)[:, None, None]
        messages = rows_of_padded(regions, torch.bmm(affinities, g))
        return regions.with_values(regions.values + self.norm(self.out(messages)))


class RegionReader(nn.Module):
    """Read the regions of an image in order by a GRU (global semantic reasoning); its final state is the result.

    Args:
        dim: width D of the regions and of the vector.

    Raises:
        ValueError: a size is not a whole number of at least 1.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        validation.check_sizes(dim=dim)
        self.rnn = nn.GRU(dim, dim)

    @outside_graphs
    def forward(self, regions: Fragments) -> Tensor:
        """Map regions (N, D) of n images to (n, D); zero for an image without regions."""
        validation.check_fragments("regions", regions)
        packing = Packing(regions.lengths, regions.device)
        if packing.n_rows == 0:
            empty = regions.values.new_zeros(len(regions), regions.values.shape[1])
            return connected(empty, [regions.values, *self.parameters()])
        return final_states(packing.unpack(self.rnn(packing.pack(regions.values))[0].data))
