"""The baseline of Deep Boosting Learning (Diao et al., IEEE TIP 2024): cross-attention and a vectorised similarity."""

from __future__ import annotations

import attrs
from torch import Tensor

from itm_fast.config import setting
from itm_fast.fragments import Fragments
from itm_fast.models.base import register
from itm_fast.models.encoders import EncoderConfig, make_image_encoder, make_text_encoder
from itm_fast.models.fragment_model import FragmentModel
from itm_fast.models.regulators import PairSteps, pair_steps, pairwise_weights
from itm_fast.nn import RegulatedSimilarity

__all__ = ["DBL", "DBLConfig"]


@attrs.frozen(kw_only=True)
class DBLConfig(EncoderConfig):
    """Settings of the baseline of Deep Boosting Learning; the defaults are the published ones."""

    word_dropout: float = setting(0.4, help="Dropout on the word vectors during training.", minimum=0, below=1)
    bidirectional: bool = setting(True, help="Use a bidirectional GRU and average its directions, as in the paper.")
    alignment_dim: int = setting(256, help="Width of the alignment vectors.", minimum=1)
    temperature: float = setting(9.0, help="Inverse temperature of the softmax over regions.")
    negative_slope: float = setting(0.1, help="Slope of the clip below zero; the paper's [x]+ has slope 0.")
    normalize_mean: bool = setting(
        True, help="L2-normalise the mean alignment before scoring, as in the authors' code but not in the paper."
    )


@register
class DBL(FragmentModel):
    """Words attend to regions; what each differs in from what it attends to is averaged and scored by a layer.

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
        self.text_encoder = make_text_encoder(config, bidirectional=config.bidirectional, no_txtnorm=config.no_txtnorm)
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
        )

    def encode_images(self, features: Tensor | Fragments) -> Fragments:
        """Region features (n, k, f), or Fragments of rows (N, f), to Fragments of rows (n * k or N, d)."""
        return self.image_encoder(features)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Padded token ids (n, L) int64 and lengths (n,) to Fragments of rows (sum of lengths, d)."""
        return self.text_encoder(token_ids, lengths)

    def score(self, images: Fragments, captions: Fragments) -> Tensor:
        """Regions and words to scores (n_images, n_captions) float32, in (-1, 1)."""
        return self.similarity(captions, images).t()

    def word_attention(self, images: Fragments, captions: Fragments) -> list[Tensor]:
        """How the words of caption i attend to the regions of image i, float32 (n_words, n_regions) for each i.

        Raises:
            ValueError: there are not equally many images and captions.
        """
        return pairwise_weights(self.similarity, images, captions)

    def pair_steps(self, images: Fragments, captions: Fragments) -> dict[str, PairSteps]:
        """What happens inside the pair of one image and one caption, words to regions; ValueError for more of them."""
        return pair_steps(images, captions, self.similarity, None)
