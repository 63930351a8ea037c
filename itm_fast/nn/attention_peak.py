"""`AttentionPeak`: how strongly words attend to their main region, a part of PFAN's score."""

from __future__ import annotations

from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.padded_pairs import padded_sets, pair_products, region_attention
from itm_fast.ops.precision import without_autocast
from itm_fast.reference import validation

__all__ = ["AttentionPeak"]


class AttentionPeak(nn.Module):
    """Average the greatest attention weight of each word, for use in `gradient_sparse_scores`.

    The attention is SCAN's, from words to regions, with the normalisation "clipped_l2norm". Source: the official code
    of Wang et al., "Position Focused Attention Network for Image-Text Matching" (IJCAI 2019).

    Args:
        temperature: inverse temperature of the softmax over regions.
        negative_slope: slope of the clip below zero.
    """

    def __init__(self, *, temperature: float = 9.0, negative_slope: float = 0.1) -> None:
        super().__init__()
        self.temperature = validation.finite_number("temperature", temperature)
        self.negative_slope = validation.finite_number("negative_slope", negative_slope)

    def forward(self, images: Fragments, captions: Fragments) -> Tensor:
        """Return (n_images, n_captions) from 0 to 1, float32 (float64 for float64); 0 for an empty set."""
        validation.check_fragments("images", images)
        validation.check_fragments("captions", captions)
        regions, seen, k = padded_sets(images)
        words, inside, lengths = padded_sets(captions)
        with without_autocast(regions.device.type):
            attention = region_attention(pair_products(regions, words), seen, self.temperature, self.negative_slope)
            peaks = (attention.amax(dim=3) * inside).sum(dim=2) / lengths.clamp(min=1)
        return peaks.masked_fill((k == 0)[:, None] | (lengths == 0), 0.0)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature!r}, negative_slope={self.negative_slope!r}"
