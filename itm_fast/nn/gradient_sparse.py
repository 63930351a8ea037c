"""Gradient sparsity for a module that scores pairs."""

from __future__ import annotations

from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast.functional.gradient_sparse import check_options
from itm_fast.ops.gradient_sparse import Sets

__all__ = ["GradientSparseScores"]


class GradientSparseScores(nn.Module):
    """Apply `itm_fast.functional.gradient_sparse_scores` to a module.

    Args:
        module: scores pairs, called as `module(images, captions)`. Its attribute `coupling` declares which scores
            depend on each other.
        chunk_pairs: approximate number of pairs that are scored at once.

    Raises:
        TypeError, ValueError: `module` is no module, or `chunk_pairs` is no whole number of at least 1.
    """

    def __init__(self, module: nn.Module, *, chunk_pairs: int = 512) -> None:
        super().__init__()
        check_options(module, chunk_pairs)
        self.module, self.chunk_pairs = module, chunk_pairs

    def forward(self, images: Sets, captions: Sets) -> Tensor:
        """Compute scores `(n_images, n_captions)`: images are rows."""
        return F_itm.gradient_sparse_scores(self.module, images, captions, chunk_pairs=self.chunk_pairs)

    def extra_repr(self) -> str:
        return f"chunk_pairs={self.chunk_pairs}"
