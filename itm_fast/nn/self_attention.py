"""`SelfAttentionLayer`: the rows of each set attend to each other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.image_encoder import narrowed
from itm_fast.nn.no_rows import connected
from itm_fast.nn.packing import padded_rows, rows_of_padded
from itm_fast.reference import validation

__all__ = ["SelfAttentionLayer"]


class SelfAttentionLayer(nn.Module):
    """Let the rows of each set attend to each other, as in a layer of BERT (Devlin et al., NAACL 2019).

    `y = LN(x + W_o a)` with the heads' attention `a = softmax(Q K^T / sqrt(d / heads)) V`, then
    `LN(y + W_2 gelu(W_1 y))`. Rows have no positions, so their order does not matter.

    Args:
        dim: width d of the rows, a multiple of `heads`.
        heads: number of attention heads.
        hidden_dim: width of the perceptron.
        dropout: in training, on the attention weights and on what both parts add.

    Raises:
        ValueError: `dim` is no multiple of `heads`, or a size is below 1.
    """

    def __init__(self, dim: int, *, heads: int = 4, hidden_dim: int = 1024, dropout: float = 0.1) -> None:
        super().__init__()
        validation.check_sizes(dim=dim, heads=heads, hidden_dim=hidden_dim)
        if dim % heads:
            raise ValueError(f"heads: expected a divisor of the width {dim}, got {heads}")
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.perceptron = nn.Sequential(nn.Linear(dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, dim))
        self.attention_norm, self.norm = (nn.LayerNorm(dim, eps=1e-12) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, sets: Fragments) -> Fragments:
        """Map rows (N, d) to rows (N, d) in float32 (float64 for float64). An empty set stays empty."""
        validation.check_fragments("sets", sets)
        wide = torch.promote_types(sets.dtype, torch.float32)
        rows = narrowed(sets.values.to(wide), self.query.weight)
        if rows.shape[0] == 0:
            return sets.with_values(connected(rows.to(wide), self.parameters()))
        query, key, value = (self._heads(sets, layer(rows)) for layer in (self.query, self.key, self.value))
        # A set without rows sees one of zeros, so that no softmax is empty; its result is left out.
        seen = torch.arange(key.shape[2], device=rows.device) < sets.lengths.clamp(min=1)[:, None]
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, seen[:, None, None], dropout)
        context = rows_of_padded(sets, mixed.transpose(1, 2).flatten(2))
        attended = self.attention_norm(rows + self.dropout(self.out(context)))
        return sets.with_values(self.norm(attended + self.dropout(self.perceptron(attended))).to(wide))

    def _heads(self, sets: Fragments, rows: Tensor) -> Tensor:
        """Pad rows (N, d), and split them into heads: (n_sets, heads, longest, d / heads)."""
        return padded_rows(sets, rows).unflatten(2, (self.heads, -1)).transpose(1, 2)
