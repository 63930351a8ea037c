"""PFAN: position focused attention (Wang et al., IJCAI 2019), with RCAR's regulators or without.

The similarity is SCAN's. RCAR's paper reports PFAN with regulators (Table II) and describes its score as the mean of
the cosines; the official code adds half of the mean greatest attention of each word (`peak_weight`).
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.config import setting
from itm_fast.fragments import Fragments
from itm_fast.models.base import register
from itm_fast.models.scan import SCAN, SCANConfig
from itm_fast.nn import AttentionPeak, AttentionScores, CrossAttentionScores, PositionEncoder

__all__ = ["PFAN", "PFANConfig"]

# Inner products of the pairs that are scored together: 8 MB in float32, and about four tensors of this size.
_CHUNK_ELEMENTS = 1 << 21
_PEAK_WEIGHT = 0.5


@attrs.frozen(kw_only=True)
class PFANConfig(SCANConfig):
    """Settings of PFAN; the defaults are those of the authors' code."""

    position_grid: int = setting(16, help="Blocks per side of the picture.", minimum=1, maximum=256)
    position_blocks: int = setting(15, help="Blocks of each region: those that its box overlaps most.", minimum=1)
    position_dim: int = setting(200, help="Width of the vectors of blocks.", minimum=1)
    peak_weight: float | None = setting(
        None,
        help="Weight of the mean greatest attention of each word in the score of direction t2i; default: 0.5, or 0 in "
        "other directions or with a regulator.",
        minimum=0,
    )


@register
class PFAN(SCAN):
    """Score regions and words by cross-attention, where regions know their position in the picture."""

    name = "pfan"
    summary = "PFAN: position focused attention, needs boxes (Wang et al., IJCAI 2019)."
    Config = PFANConfig

    def __init__(self, config: PFANConfig) -> None:
        if config.image_encoder != "linear" or config.image_backbone:
            raise ValueError(
                f"image_encoder: regions with boxes pass a linear layer; expected linear, got {config.image_encoder}"
            )
        super().__init__(config)
        self.image_encoder = PositionEncoder(
            config.feature_dim,
            config.embed_dim,
            grid=config.position_grid,
            blocks=config.position_blocks,
            position_dim=config.position_dim,
            no_imgnorm=config.no_imgnorm,
        )
        self.peak_weight, self.peak = self._make_peak()

    def _make_peak(self) -> tuple[float, AttentionPeak | None]:
        config, attention = self.config, self.text_to_image
        plain = config.direction == "t2i" and isinstance(attention, CrossAttentionScores)
        if config.peak_weight is None and not plain:
            return 0.0, None
        weight = _PEAK_WEIGHT if config.peak_weight is None else config.peak_weight
        if not weight:
            return 0.0, None
        if not plain or not isinstance(attention, CrossAttentionScores):
            raise ValueError(f"peak_weight: {weight} goes with direction t2i and no regulator; expected 0")
        if config.normalization != "clipped_l2norm" or config.focal is not None:
            raise ValueError(f"peak_weight: {weight} goes with normalization clipped_l2norm and no focal; expected 0")
        return weight, AttentionPeak(temperature=attention.temperature, negative_slope=attention.negative_slope)

    @property
    def reads_boxes(self) -> bool:
        """Return True: regions come with their boxes."""
        return True

    @property
    def scores_within_one(self) -> bool:
        """Return whether scores are means or maxima of cosines, and nothing is added."""
        return self.peak is None and super().scores_within_one

    @property
    def scores_are_probabilities(self) -> bool:
        """Return whether a regulator ends in a sigmoid, and nothing is added."""
        return self.peak is None and super().scores_are_probabilities

    @property
    def attention_scores(self) -> AttentionScores | None:
        """Return the cross-attention of the model's directions; None if it is not the whole score."""
        return super().attention_scores if self.peak is None else None

    def score(self, images: Fragments, captions: Fragments) -> Tensor:
        """Score regions and words: (n_images, n_captions) float32, images are rows."""
        scores: Tensor = super().score(images, captions)
        if self.peak is None:
            return scores
        chunk = max(1, _CHUNK_ELEMENTS // max(images.max_length * captions.max_length, 1))
        with torch.autocast(images.device.type, enabled=False):
            peaks = F_itm.gradient_sparse_scores(self.peak, images, captions, chunk_pairs=chunk)
        return scores + self.peak_weight * peaks
