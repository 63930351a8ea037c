"""BFAN: bidirectional focal attention (Liu et al., ACM MM 2019), with RCAR's regulators or without.

Deep Boosting Learning uses it "with equal attention and similarity representation": `similarity: vector` scores each
direction as its baseline (its Eq 2) and adds the scores.
"""

from __future__ import annotations

from typing import Any

import attrs
from torch import Tensor

from itm_fast.config import setting
from itm_fast.fragments import Fragments
from itm_fast.models.base import register
from itm_fast.models.encoders import make_caption_encoder, make_image_encoder
from itm_fast.models.fragment_model import FragmentModel
from itm_fast.models.regulators import (
    PairSteps,
    RegulatedConfig,
    make_similarity,
    pair_steps,
    pairwise_weights,
    steps_of,
)
from itm_fast.nn import AttentionScores, CrossAttentionScores, RegulatedSimilarity

__all__ = ["BFAN", "BFANConfig"]


@attrs.frozen(kw_only=True)
class BFANConfig(RegulatedConfig):
    """Settings of BFAN; the defaults are the published ones."""

    bidirectional: bool = setting(True, help="Use a bidirectional GRU and average its directions, as in the paper.")
    focal: str = setting(
        "equal",
        help="Reassignment of attention: equal weights for all contexts (equal), or their attention weights (prob).",
        choices=("equal", "prob"),
    )
    similarity: str = setting(
        "cosine",
        help="Score of a direction without a regulator: the mean cosine (cosine), or the mean alignment by a learned "
        "layer, as Deep Boosting Learning's baseline (vector).",
        choices=("cosine", "vector"),
    )
    temperature: float = setting(20.0, help="Inverse temperature of the softmax, in both directions.")
    negative_slope: float = setting(0.1, help="Slope of the clip below zero.")


@register
class BFAN(FragmentModel):
    """Score by focal attention in both directions, and add the scores. Irrelevant fragments lose their attention."""

    name = "bfan"
    summary = "BFAN: bidirectional focal attention (Liu et al., ACM MM 2019)."
    Config = BFANConfig

    def __init__(self, config: BFANConfig) -> None:
        super().__init__()
        self.config = config
        self.image_encoder = make_image_encoder(config, no_imgnorm=config.no_imgnorm)
        self.text_encoder = make_caption_encoder(
            config, bidirectional=config.bidirectional, no_txtnorm=config.no_txtnorm
        )
        steps_of(config)
        if config.similarity == "vector" and config.regulator is not None:
            raise ValueError(f"similarity: vector goes without a regulator, got {config.regulator}")
        self.text_to_image = self._similarity()
        self.image_to_text = self._similarity()

    def _similarity(self) -> CrossAttentionScores | RegulatedSimilarity:
        options: dict[str, Any] = {
            "temperature": self.config.temperature,
            "negative_slope": self.config.negative_slope,
            "focal": self.config.focal,
        }
        if self.config.similarity == "vector":
            return RegulatedSimilarity(
                self.config.embed_dim,
                self.config.alignment_dim,
                correspondence_steps=0,
                aggregation_steps=0,
                score_mean=True,
                activation="tanh",
                normalize_mean=True,
                **options,
            )
        return (
            CrossAttentionScores(**options)
            if self.config.regulator is None
            else make_similarity(self.config, **options)
        )

    def encode_images(self, features: Tensor | Fragments) -> Fragments:
        """Encode region features (n, k, f), or Fragments of rows (N, f), as Fragments of rows (n * k or N, d)."""
        return self.image_encoder(features)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Encode padded token ids (n, L) int64 and lengths (n,) as Fragments of rows (sum of lengths, d)."""
        return self.text_encoder(token_ids, lengths)

    @property
    def scores_within_one(self) -> bool:
        """Return False: a score is the sum of two cosines."""
        return False

    def score(self, images: Fragments, captions: Fragments) -> Tensor:
        """Score regions and words: (n_images, n_captions) float32, images are rows. The sum of both directions."""
        return self.text_to_image(captions, images).t() + self.image_to_text(images, captions)

    @property
    def attention_scores(self) -> AttentionScores | None:
        """Return the cross-attention of both directions; None with regulators."""
        return AttentionScores.of(self.text_to_image, self.image_to_text)

    def word_attention(self, images: Fragments, captions: Fragments) -> list[Tensor]:
        """Return the attention of caption i over image i for each i, float32 (n_words, n_regions).

        Raises:
            ValueError: the numbers of images and captions differ.
        """
        return pairwise_weights(self.text_to_image, images, captions)

    def pair_steps(self, images: Fragments, captions: Fragments) -> dict[str, PairSteps]:
        """Return the intermediate results of one image and one caption in both directions; ValueError for more."""
        return pair_steps(images, captions, self.text_to_image, self.image_to_text)
