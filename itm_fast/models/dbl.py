"""The baseline of Deep Boosting Learning (Diao et al., IEEE TIP 2024): cross-attention and a vectorised similarity."""

from __future__ import annotations

import attrs
from torch import Tensor

from itm_fast.config import setting
from itm_fast.fragments import Fragments
from itm_fast.models.base import register
from itm_fast.models.encoders import BertEncoderConfig, make_caption_encoder, make_image_encoder
from itm_fast.models.fragment_model import FragmentModel
from itm_fast.models.regulators import PairSteps, pair_steps, pairwise_weights
from itm_fast.nn import RegulatedSimilarity

__all__ = ["DBL", "DBLConfig"]


@attrs.frozen(kw_only=True)
class DBLConfig(BertEncoderConfig):
    """Settings of the baseline of Deep Boosting Learning; the defaults are the published ones."""

    word_dropout: float = setting(0.4, help="Dropout on the word vectors during training.", minimum=0, below=1)
    bidirectional: bool = setting(True, help="Use a bidirectional GRU and average its directions, as in the paper.")
    alignment_dim: int = setting(256, help="Width of the alignment vectors.", minimum=1)
    temperature: float = setting(9.0, help="Inverse temperature of the softmax over regions.")
    negative_slope: float = setting(0.1, help="Slope of the clip below zero; the paper's [x]+ has slope 0.")
    normalize_attended: bool = setting(
        True,
        help="L2-normalise the attended vectors before the alignment, as in the authors' code but not in the paper.",
    )
    normalize_mean: bool = setting(
        True, help="L2-normalise the mean alignment before scoring, as in the authors' code but not in the paper."
    )


@register
class DBL(FragmentModel):
    """Score the mean alignment of the words with their attended regions by a linear layer.

    Eq 1 and 2: `tanh(u^T a + u0)` with the mean `a` of the words' alignments.
    """

    name = "dbl"
    summary = (
        "Baseline of Deep Boosting Learning: cross-attention and a similarity vector (Diao et al., IEEE TIP 2024)."
    )
    Config = DBLConfig

    def __init__(self, config: DBLConfig) -> None:
        super().__init__()
        self.config = config
        self.image_encoder = make_image_encoder(config, no_imgnorm=config.no_imgnorm)
        self.text_encoder = make_caption_encoder(
            config, bidirectional=config.bidirectional, no_txtnorm=config.no_txtnorm
        )
        self.similarity = RegulatedSimilarity(
            config.embed_dim,
            config.alignment_dim,
            correspondence_steps=0,
            aggregation_steps=0,
            score_mean=True,
            temperature=config.temperature,
            negative_slope=config.negative_slope,
            activation="tanh",
            normalize_mean=config.normalize_mean,
            normalize_attended=config.normalize_attended,
        )

    def encode_images(self, features: Tensor | Fragments) -> Fragments:
        """Encode region features (n, k, f), or Fragments of rows (N, f), as Fragments of rows (n * k or N, d)."""
        return self.image_encoder(features)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Encode padded token ids (n, L) int64 and lengths (n,) as Fragments of rows (sum of lengths, d)."""
        return self.text_encoder(token_ids, lengths)

    def score(self, images: Fragments, captions: Fragments) -> Tensor:
        """Score regions and words: (n_images, n_captions) float32 in (-1, 1), images are rows."""
        return self.similarity(captions, images).t()

    def word_attention(self, images: Fragments, captions: Fragments) -> list[Tensor]:
        """Return the attention of caption i over image i for each i, float32 (n_words, n_regions).

        Raises:
            ValueError: the numbers of images and captions differ.
        """
        return pairwise_weights(self.similarity, images, captions)

    def pair_steps(self, images: Fragments, captions: Fragments) -> dict[str, PairSteps]:
        """Return the intermediate results of one image and one caption, words to regions; ValueError for more."""
        return pair_steps(images, captions, self.similarity, None)
