"""Regions with their positions to region embeddings, as PFAN does.

Inside: `PositionEncoder`, `box_blocks`.

Source: Wang et al., "Position Focused Attention Network for Image-Text Matching" (IJCAI 2019), section 3.2, in the form
of its official code. That code reads blocks and overlaps from files and does not show how they were made: here an
overlap is the share of a block that a region covers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.image_encoder import as_regions, detach_blank_rows, linear_layer
from itm_fast.nn.normalization import l2norm
from itm_fast.reference import validation

__all__ = ["PositionEncoder", "box_blocks"]

EDGES = 4


class PositionEncoder(nn.Module):
    """Encode regions by a linear layer over their features and the embedding of their positions, and l2 normalisation.

    The picture is divided into `grid` by `grid` blocks, each with a learned vector e_j. Of the blocks j that overlap
    the box of a region x most, with the overlaps a_j: `b = softmax_j(tanh(<Q x, e_j>))`, `c = softmax_j(a_j b_j)`. The
    position is `p = sum_j c_j e_j`, the embedding `l2norm(W [x; p])`.

    Args:
        feature_dim: width f of the region features.
        embed_dim: width d of the embeddings.
        grid: blocks per side of the picture.
        blocks: number of blocks of each region. A region that touches fewer has block number grid * grid, which has a
            vector, too, with an overlap of 0 in the places left.
        position_dim: width of the vectors of blocks.
        no_imgnorm: leave the l2 normalisation out.

    Raises:
        ValueError: a size is not a whole number of at least 1.
    """

    def __init__(
        self,
        feature_dim: int,
        embed_dim: int,
        *,
        grid: int = 16,
        blocks: int = 15,
        position_dim: int = 200,
        no_imgnorm: bool = False,
    ) -> None:
        super().__init__()
        validation.check_sizes(
            feature_dim=feature_dim, embed_dim=embed_dim, grid=grid, blocks=blocks, position_dim=position_dim
        )
        if blocks > grid * grid:
            raise ValueError(f"position_blocks: expected at most {grid * grid}, the blocks of a picture, got {blocks}")
        self.grid, self.blocks, self.no_imgnorm = grid, blocks, no_imgnorm
        self.feature_dim = feature_dim
        self.fc = linear_layer(feature_dim + position_dim, embed_dim)
        self.query = nn.Linear(feature_dim, position_dim)
        self.positions = nn.Embedding(grid * grid + 1, position_dim)

    def forward(self, features: Tensor | Fragments) -> Fragments:
        """Encode regions with boxes.

        Args:
            features: (n, k, f + 4), or Fragments of rows (N, f + 4). The last four values are the left, top, right and
                bottom edge of the box, as shares of the picture's sides.

        Returns:
            Fragments of rows (n * k or N, d).

        Raises:
            TypeError: `features` is not a tensor or Fragments.
            ValueError: the regions have another width.
        """
        values = features.values if isinstance(features, Fragments) else features
        if isinstance(values, Tensor) and values.shape[-1:] == (self.feature_dim,):
            raise ValueError(
                f"features: expected {self.feature_dim} values per region and four of its box, got "
                f"{self.feature_dim}; pass dataset.image_batch(...) after dataset.read_boxes()"
            )
        regions = as_regions(features, self.feature_dim + EDGES)
        rows, boxes = regions.values[:, : self.feature_dim], regions.values[:, self.feature_dim :]
        embedded = detach_blank_rows(self.fc(torch.cat([rows, self._position(rows, boxes)], dim=1)), rows)
        return regions.with_values(embedded if self.no_imgnorm else l2norm(embedded))

    def _position(self, rows: Tensor, boxes: Tensor) -> Tensor:
        numbers, overlaps = box_blocks(boxes, self.grid, self.blocks)
        vectors = self.positions(numbers)
        relevance = torch.einsum("np,nbp->nb", self.query(rows).to(vectors.dtype), vectors).tanh().softmax(dim=1)
        shares = (overlaps.to(relevance.dtype) * relevance).softmax(dim=1)
        return torch.einsum("nb,nbp->np", shares, vectors).to(rows.dtype)


def box_blocks(boxes: Tensor, grid: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Return the blocks that boxes overlap most, the greatest overlap first.

    Equal overlaps are in reading order.

    Args:
        boxes: (N, 4) left, top, right and bottom edge, as shares of the picture's sides.
        grid: blocks per side of the picture.
        blocks: number of blocks per box.

    Returns:
        The numbers of the blocks (N, blocks) int64, row by row from the top left, `grid * grid` where a box overlaps no
        more; and the shares of these blocks that the box covers (N, blocks), in the dtype of the boxes.
    """
    lines = torch.arange(grid + 1, device=boxes.device, dtype=boxes.dtype)
    left, top, right, bottom = (boxes.detach() * grid).unbind(1)
    across, down = (
        (torch.minimum(end[:, None], lines[1:]) - torch.maximum(start[:, None], lines[:-1])).clamp(min=0.0)
        for start, end in ((left, right), (top, bottom))
    )
    overlaps = (down[:, :, None] * across[:, None, :]).flatten(1)
    # A stable sort, as many blocks are covered as a whole.
    found, numbers = overlaps.sort(dim=1, descending=True, stable=True)
    found, numbers = found[:, :blocks], numbers[:, :blocks]
    return numbers.masked_fill(found == 0, grid * grid), found
