"""NAAF: negative-aware attention (Zhang et al., CVPR 2022).

"Negative-Aware Attention Framework for Image-Text Matching". The official code updates its thresholds after each
caption of a batch, and resets them to 0 at the start of each batch; here a batch is scored with the thresholds of the
batches before it, and updates them once.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.config import setting
from itm_fast.fragments import Fragments
from itm_fast.models.base import register
from itm_fast.models.encoders import BertEncoderConfig, make_caption_encoder, make_image_encoder
from itm_fast.models.fragment_model import FragmentModel
from itm_fast.models.regulators import PairSteps, check_pair, directed_steps, pairwise_weights
from itm_fast.nn import NegativeAwareSimilarity

__all__ = ["NAAF", "NAAFConfig"]

# Inner products of the pairs that are scored together: 8 MB in float32, and about eight tensors of this size.
_CHUNK_ELEMENTS = 1 << 21


@attrs.frozen(kw_only=True)
class NAAFConfig(BertEncoderConfig):
    """Settings of NAAF; the defaults are those of the authors' code."""

    bidirectional: bool = setting(True, help="Use a bidirectional GRU and average its directions.")
    temperature: float = setting(20.0, help="Inverse temperature of the softmax over regions.")
    negative_slope: float = setting(0.1, help="Slope of the clip below zero.")
    intra_temperature: float = setting(5.0, help="Inverse temperature of the relations between words, in evaluation.")
    penalty: float = setting(
        2.0, help="Weight of the mismatched words beside the matched ones where the threshold is learned.", above=0
    )
    threshold_words: int = setting(
        200,
        help="Matched words in a batch from which the thresholds are learned; with fewer, they are 0.",
        minimum=2,
    )


@register
class NAAF(FragmentModel):
    """Score the words by the regions that match them, less how far the best region is below a learned threshold."""

    name = "naaf"
    summary = "NAAF: negative-aware attention with learned thresholds (Zhang et al., CVPR 2022)."
    Config = NAAFConfig
    scoring_parts = ("similarity",)

    def __init__(self, config: NAAFConfig) -> None:
        super().__init__()
        self.config = config
        # A word's cosine with what it attends to takes its norm for 1.
        if config.no_txtnorm:
            raise ValueError("no_txtnorm: the similarity takes words of norm 1; expected false")
        self.image_encoder = make_image_encoder(config, no_imgnorm=config.no_imgnorm)
        self.text_encoder = make_caption_encoder(config, bidirectional=config.bidirectional, no_txtnorm=False)
        self.similarity = NegativeAwareSimilarity(
            temperature=config.temperature,
            negative_slope=config.negative_slope,
            intra_temperature=config.intra_temperature,
            penalty=config.penalty,
            threshold_words=config.threshold_words,
        )

    def encode_images(self, features: Tensor | Fragments) -> Fragments:
        """Encode region features (n, k, f), or Fragments of rows (N, f), as Fragments of rows (n * k or N, d)."""
        return self.image_encoder(features)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Encode padded token ids (n, L) int64 and lengths (n,) as Fragments of rows (sum of lengths, d)."""
        return self.text_encoder(token_ids, lengths)

    @property
    def scores_within_one(self) -> bool:
        """Return False: a score is the sum of two attentions, up to 2."""
        return False

    def score(self, images: Fragments, captions: Fragments) -> Tensor:
        """Score regions and words: (n_images, n_captions) float32, images are rows."""
        pair = max(images.max_length * captions.max_length, 1)
        return F_itm.gradient_sparse_scores(
            self.similarity, images, captions, chunk_pairs=max(1, _CHUNK_ELEMENTS // pair)
        )

    def observe(
        self,
        images: Fragments,
        captions: Fragments,
        scores: Tensor,
        *,
        first: int = 0,
        total: Callable[[Tensor], Tensor] = lambda own: own,
    ) -> None:
        """Learn the thresholds from the scores of a batch."""
        self.similarity.update(total(self.similarity.statistics(images, captions, scores, first)))

    def word_attention(self, images: Fragments, captions: Fragments) -> list[Tensor]:
        """Return the attention of caption i over image i for each i, float32 (n_words, n_regions), without threshold.

        Raises:
            ValueError: the numbers of images and captions differ.
        """
        return pairwise_weights(self.similarity, images, captions)

    def pair_steps(self, images: Fragments, captions: Fragments) -> dict[str, PairSteps]:
        """Return the intermediate results of one image and one caption, words to regions; ValueError for more."""
        check_pair(images, captions)
        return {"t2i": directed_steps(self.similarity, captions, images, self.score(images, captions))}
