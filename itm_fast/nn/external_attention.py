"""`ExternalSpacePooling`: ESA's pooling of a set, with an attention of its own in each channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.image_encoder import linear_layer, narrowed
from itm_fast.nn.no_rows import connected
from itm_fast.nn.packing import padded_rows
from itm_fast.reference import validation

__all__ = ["ExternalSpacePooling"]


class ExternalSpacePooling(nn.Module):
    """Pool the rows of each set to `sum_k a_k * x_k`, with `a_k = softmax_k(W x_k + b)` separately in each channel.

    Args:
        dim: width d of the rows and of the result.

    Raises:
        ValueError: a size is not a whole number of at least 1.

    Source: Zhu et al., "ESA: External Space Attention Aggregation for Image-Text Retrieval" (IEEE TCSVT 2023), in the
    form of its official code.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        validation.check_sizes(dim=dim)
        self.linear = linear_layer(dim, dim)

    def forward(self, sets: Fragments) -> Tensor:
        """Pool rows (N, d) of n sets to (n, d), float32 (float64 for float64); zero for an empty set."""
        validation.check_fragments("sets", sets)
        rows = sets.values.to(torch.promote_types(sets.dtype, torch.float32))
        if rows.shape[0] == 0:
            return connected(rows.new_zeros(len(sets), rows.shape[1]), [rows, *self.parameters()])
        logits = self.linear(narrowed(rows, self.linear.weight)).to(rows.dtype)
        values, logits = padded_rows(sets, rows), padded_rows(sets, logits)
        # An empty set sees one row of zeros, which gives zero.
        inside = torch.arange(values.shape[1], device=rows.device) < sets.lengths.clamp(min=1)[:, None]
        weights = logits.masked_fill(~inside[:, :, None], -torch.inf).softmax(dim=1)
        return (weights * values).sum(dim=1)
