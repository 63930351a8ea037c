"""Padded sets and the attention of all their pairs, for modules that score pairs in chunks.

Inside: `at_least_a_row`, `padded_sets`, `pair_products`, `region_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.normalization import l2norm

__all__ = ["at_least_a_row", "padded_sets", "pair_products", "region_attention"]


def at_least_a_row(sets: Fragments) -> tuple[Tensor, Tensor]:
    """Return padded rows (n, longest, d) and the lengths (n,). If no set has rows, the padding is one row wide."""
    padded, lengths = sets.to_padded()
    if padded.shape[1] == 0:
        padded = padded.new_zeros(len(sets), 1, padded.shape[2])
    return padded, lengths


def padded_sets(sets: Fragments) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows (n, longest, d) in at least float32, which of them belong to a set, and the lengths (n,).

    The first row of an empty set counts as inside, so that nothing is infinite.
    """
    padded, lengths = at_least_a_row(sets)
    inside = torch.arange(padded.shape[1], device=padded.device) < lengths.clamp(min=1)[:, None]
    return padded.to(torch.promote_types(padded.dtype, torch.float32)), inside, lengths


def pair_products(regions: Tensor, words: Tensor) -> Tensor:
    """Return the inner products (n, m, w, k) of regions (n, k, d) and words (m, w, d)."""
    products = regions.flatten(0, 1) @ words.flatten(0, 1).t()
    return products.view(*regions.shape[:2], *words.shape[:2]).permute(0, 2, 3, 1)


def region_attention(products: Tensor, seen: Tensor, temperature: float, negative_slope: float) -> Tensor:
    """Return SCAN's attention of words to regions with the normalisation "clipped_l2norm".

    Args:
        products: (n, m, w, k), as `pair_products` returns them. Padding words are zero: they add nothing to the norms.
        seen: (n, k) bool, the regions that belong to an image.
        temperature: inverse temperature of the softmax.
        negative_slope: slope of the clip below zero.

    Returns:
        (n, m, w, k); each row over the regions sums to one.
    """
    normed = l2norm(nn.functional.leaky_relu(products, negative_slope), dim=2)
    return (temperature * normed).masked_fill(~seen[:, None, None], -torch.inf).softmax(dim=3)
