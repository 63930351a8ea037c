"""CHAN: each word aligned with the one region that fits it best (Pan et al., CVPR 2023).

"Fine-grained Image-text Matching by Cross-modal Hard Aligning Network". The published models take the greatest cosine
over the regions for each word, and aggregate over the words: by log-sum-exp with a GRU, by the mean with BERT. The
official code adds self-attention over regions if the text encoder is a GRU: `region_attention`.
"""

from __future__ import annotations

import attrs
from torch import Tensor

from itm_fast.config import setting
from itm_fast.fragments import Fragments
from itm_fast.models.base import register
from itm_fast.models.encoders import BertEncoderConfig, make_caption_encoder, make_image_encoder
from itm_fast.models.fragment_model import FragmentModel
from itm_fast.models.regulators import PairSteps, pair_steps, pairwise_weights
from itm_fast.nn import AttentionScores, CrossAttentionScores, RegionAttention, l2norm
from itm_fast.nn.image_encoder import detach_blank_rows

__all__ = ["CHAN", "CHANConfig"]


@attrs.frozen(kw_only=True)
class CHANConfig(BertEncoderConfig):
    """Settings of CHAN; the defaults are those published with a GRU."""

    bidirectional: bool = setting(True, help="Use a bidirectional GRU and average its directions, as in the paper.")
    region_attention: bool = setting(
        False, help="Let the regions of an image attend to each other, as published with a GRU."
    )
    aggregation: str = setting(
        "logsumexp", help="Aggregation of the best cosine of each word.", choices=("logsumexp", "mean", "max", "sum")
    )
    logsumexp_temperature: float = setting(
        10.0,
        help="Temperature t of logsumexp, log(sum exp(t s)) / t; the authors' code has no division.",
        above=0,
    )


@register
class CHAN(FragmentModel):
    """Regions and words in one space; a caption's score is aggregated from each word's best region."""

    name = "chan"
    summary = "CHAN: hard assignment of each word to its best region (Pan et al., CVPR 2023)."
    Config = CHANConfig

    def __init__(self, config: CHANConfig) -> None:
        super().__init__()
        self.config = config
        attends = config.region_attention
        self.image_encoder = make_image_encoder(config, no_imgnorm=config.no_imgnorm or attends)
        self.region_attention = RegionAttention(config.embed_dim) if attends else None
        self.text_encoder = make_caption_encoder(
            config, bidirectional=config.bidirectional, no_txtnorm=config.no_txtnorm
        )
        self.text_to_image = CrossAttentionScores(
            temperature=1.0,
            normalization="no_norm",
            focal="hard",
            aggregation=config.aggregation,
            logsumexp_temperature=config.logsumexp_temperature,
        )

    def encode_images(self, features: Tensor | Fragments) -> Fragments:
        """Encode region features (n, k, f), or Fragments of rows (N, f), as Fragments of rows (n * k or N, d)."""
        regions: Fragments = self.image_encoder(features)
        if self.region_attention is None:
            return regions
        regions = self.region_attention(regions)
        rows = features.values if isinstance(features, Fragments) else features.flatten(0, 1)
        # A vision model may return other regions than it reads.
        if rows.shape[0] == regions.values.shape[0]:
            regions = regions.with_values(detach_blank_rows(regions.values, rows))
        return regions if self.config.no_imgnorm else regions.with_values(l2norm(regions.values))

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Encode padded token ids (n, L) int64 and lengths (n,) as Fragments of rows (sum of lengths, d)."""
        return self.text_encoder(token_ids, lengths)

    @property
    def scores_within_one(self) -> bool:
        """Return whether scores are means or maxima of cosines."""
        return self.config.aggregation in ("mean", "max")

    def score(self, images: Fragments, captions: Fragments) -> Tensor:
        """Score regions and words: (n_images, n_captions) float32, images are rows."""
        return self.text_to_image(captions, images).t()

    @property
    def attention_scores(self) -> AttentionScores:
        """Return the cross-attention of words to regions."""
        return AttentionScores(t2i=self.text_to_image)

    def word_attention(self, images: Fragments, captions: Fragments) -> list[Tensor]:
        """Return which region of image i each word of caption i selects: float32 (n_words, n_regions) each, 1 or 0.

        Raises:
            ValueError: the numbers of images and captions differ.
        """
        return pairwise_weights(self.text_to_image, images, captions)

    def pair_steps(self, images: Fragments, captions: Fragments) -> dict[str, PairSteps]:
        """Return the intermediate results of one image and one caption, words to regions; ValueError for more."""
        return pair_steps(images, captions, self.text_to_image, None)
