"""CHAN: each word aligned with the one region that fits it best (Pan et al., CVPR 2023).

"Fine-grained Image-text Matching by Cross-modal Hard Aligning Network", whose published models score words against
regions: the greatest cosine over the regions for each word, and over the words log-sum-exp where a GRU reads captions,
the mean where BERT does. The self-attention over regions that its public code has beside a GRU is left out; with BERT
it has none.
"""

from __future__ import annotations

import attrs
from torch import Tensor

from itm_fast.config import setting
from itm_fast.fragments import Fragments
from itm_fast.models.base import register
from itm_fast.models.encoders import BertEncoderConfig, make_bert_encoder, make_image_encoder, make_text_encoder
from itm_fast.models.fragment_model import FragmentModel
from itm_fast.models.regulators import PairSteps, pair_steps, pairwise_weights
from itm_fast.nn import BertTextEncoder, CrossAttentionScores, TextEncoder

__all__ = ["CHAN", "CHANConfig"]


@attrs.frozen(kw_only=True)
class CHANConfig(BertEncoderConfig):
    """Settings of CHAN; the defaults are those published with a GRU."""

    bidirectional: bool = setting(True, help="Use a bidirectional GRU and average its directions, as in the paper.")
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
        self.image_encoder = make_image_encoder(config, no_imgnorm=config.no_imgnorm)
        self.text_encoder: TextEncoder | BertTextEncoder
        if config.text_encoder == "bert":
            self.text_encoder = make_bert_encoder(config, no_txtnorm=config.no_txtnorm)
        else:
            self.text_encoder = make_text_encoder(
                config, bidirectional=config.bidirectional, no_txtnorm=config.no_txtnorm
            )
        self.text_to_image = CrossAttentionScores(
            temperature=1.0,
            normalization="no_norm",
            focal="hard",
            aggregation=config.aggregation,
            logsumexp_temperature=config.logsumexp_temperature,
        )

    @property
    def max_caption_length(self) -> int | None:
        """Tokens in the longest caption that BERT reads; None with a GRU, which reads any."""
        return self.text_encoder.max_length if isinstance(self.text_encoder, BertTextEncoder) else None

    def encode_images(self, features: Tensor | Fragments) -> Fragments:
        """Region features (n, k, f), or Fragments of rows (N, f), to Fragments of rows (n * k or N, d)."""
        return self.image_encoder(features)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Padded token ids (n, L) int64 and lengths (n,) to Fragments of rows (sum of lengths, d)."""
        return self.text_encoder(token_ids, lengths)

    @property
    def scores_within_one(self) -> bool:
        """Of means and greatest cosines."""
        return self.config.aggregation in ("mean", "max")

    def score(self, images: Fragments, captions: Fragments) -> Tensor:
        """Regions and words to scores (n_images, n_captions) float32."""
        return self.text_to_image(captions, images).t()

    def word_attention(self, images: Fragments, captions: Fragments) -> list[Tensor]:
        """Which region each word of caption i takes of image i: float32 (n_words, n_regions) for each i, 1 or 0.

        Raises:
            ValueError: there are not equally many images and captions.
        """
        return pairwise_weights(self.text_to_image, images, captions)

    def pair_steps(self, images: Fragments, captions: Fragments) -> dict[str, PairSteps]:
        """What happens inside the pair of one image and one caption, words to regions; ValueError for more of them."""
        return pair_steps(images, captions, self.text_to_image, None)
