"""`RegionAttention`: CHAN's self-attention over the regions of an image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.no_rows import connected
from itm_fast.nn.packing import padded_rows, rows_of_padded
from itm_fast.reference import validation

__all__ = ["RegionAttention"]


class RegionAttention(nn.Module):
    """Add what the rows of a set attend to: `x + W_o softmax(Q K^T / sqrt(d / heads)) V` of `LN(x)`, with biases.

    Source: the official code of Pan et al., "Fine-grained Image-text Matching by Cross-modal Hard Aligning Network"
    (CVPR 2023). In training that code also attends to padding; here padding has no weight.

    Args:
        dim: width d of the rows, a multiple of `heads`.
        heads: number of attention heads.

    Raises:
        ValueError: `dim` is no multiple of `heads`, or a size is below 1.
    """

    def __init__(self, dim: int, *, heads: int = 8) -> None:
        super().__init__()
        validation.check_sizes(dim=dim, heads=heads)
        if dim % heads:
            raise ValueError(f"embed_dim: expected a multiple of the {heads} heads of region_attention, got {dim}")
        self.ln = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, sets: Fragments) -> Fragments:
        """Map rows (N, d) to rows (N, d). An empty set stays empty."""
        validation.check_fragments("sets", sets)
        rows: Tensor = self.ln(sets.values)
        if rows.shape[0] == 0:
            return sets.with_values(connected(sets.values, self.parameters()))
        padded = padded_rows(sets, rows)
        # A set without rows sees one of zeros, so that no softmax is empty; its result is left out.
        hidden = torch.arange(padded.shape[1], device=rows.device) >= sets.lengths.clamp(min=1)[:, None]
        mixed, _ = self.attn(padded, padded, padded, key_padding_mask=hidden, need_weights=False)
        return sets.with_values(sets.values + rows_of_padded(sets, mixed).to(sets.dtype))
