"""SCAN: stacked cross-attention between regions and words (Lee et al., ECCV 2018), with RCAR's regulators too."""

from __future__ import annotations

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

__all__ = ["SCAN", "SCANConfig"]

NORMALIZATIONS = ("clipped_l2norm", "l2norm", "clipped_l1norm", "l1norm", "softmax", "clipped", "no_norm")


@attrs.frozen(kw_only=True)
class SCANConfig(RegulatedConfig):
    """Settings of SCAN; the defaults are the published ones."""

    bidirectional: bool = setting(True, help="Use a bidirectional GRU and average its directions, as in the paper.")
    direction: str = setting(
        "t2i",
        help="Attention from words to regions (t2i), from regions to words (i2t), or the mean of both scores (mean).",
        choices=("t2i", "i2t", "mean"),
    )
    t2i_temperature: float | None = setting(
        None, help="Inverse temperature of the softmax over regions; default: 9, or initially 10 with a regulator."
    )
    i2t_temperature: float | None = setting(
        None, help="Inverse temperature of the softmax over words; default: 4, or initially 3 with a regulator."
    )
    normalization: str = setting(
        "clipped_l2norm", help="Normalisation of the raw attention over the queries.", choices=NORMALIZATIONS
    )
    negative_slope: float = setting(0.1, help="Slope of the clip below zero; the paper's [x]+ has slope 0.")
    focal: str | None = setting(
        None, help="Reassignment of attention as in BFAN; default: none.", choices=("equal", "prob")
    )
    aggregation: str = setting(
        "mean", help="Aggregation of the cosines over the queries.", choices=("mean", "logsumexp", "max", "sum")
    )
    t2i_logsumexp_temperature: float = setting(6.0, help="Temperature of logsumexp, text to image.", above=0)
    i2t_logsumexp_temperature: float = setting(
        5.0, help="Temperature of logsumexp, image to text. The paper uses 5 on Flickr30K and 20 on COCO.", above=0
    )


# Inverse temperatures as published, without a regulator (SCAN) and with one (RCAR's official code).
_TEMPERATURES = {"t2i": (9.0, 10.0), "i2t": (4.0, 3.0)}


@register
class SCAN(FragmentModel):
    """Score regions and words by cross-attention in one or both directions."""

    name = "scan"
    summary = "SCAN: stacked cross-attention between regions and words (Lee et al., ECCV 2018)."
    Config = SCANConfig

    def __init__(self, config: SCANConfig) -> None:
        super().__init__()
        self.config = config
        self.image_encoder = make_image_encoder(config, no_imgnorm=config.no_imgnorm)
        self.text_encoder = make_caption_encoder(
            config, bidirectional=config.bidirectional, no_txtnorm=config.no_txtnorm
        )
        steps_of(config)
        if config.regulator is not None:
            for name, value in (("normalization", "clipped_l2norm"), ("aggregation", "mean")):
                if getattr(config, name) != value:
                    raise ValueError(f"{name}: expected {value} with a regulator, got {getattr(config, name)}")
        self.text_to_image = self._similarity("t2i", config.t2i_temperature, config.t2i_logsumexp_temperature)
        self.image_to_text = self._similarity("i2t", config.i2t_temperature, config.i2t_logsumexp_temperature)

    def _similarity(
        self, direction: str, temperature: float | None, logsumexp_temperature: float
    ) -> CrossAttentionScores | RegulatedSimilarity | None:
        """Create the similarity of one direction; None if the direction is not used."""
        if self.config.direction not in (direction, "mean"):
            return None
        if temperature is None:
            temperature = _TEMPERATURES[direction][self.config.regulator is not None]
        if self.config.regulator is not None:
            return make_similarity(
                self.config,
                temperature=temperature,
                negative_slope=self.config.negative_slope,
                focal=self.config.focal,
            )
        return CrossAttentionScores(
            temperature=temperature,
            normalization=self.config.normalization,
            negative_slope=self.config.negative_slope,
            focal=self.config.focal,
            aggregation=self.config.aggregation,
            logsumexp_temperature=logsumexp_temperature,
        )

    def encode_images(self, features: Tensor | Fragments) -> Fragments:
        """Encode region features (n, k, f), or Fragments of rows (N, f), as Fragments of rows (n * k or N, d)."""
        return self.image_encoder(features)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Encode padded token ids (n, L) int64 and lengths (n,) as Fragments of rows (sum of lengths, d)."""
        return self.text_encoder(token_ids, lengths)

    @property
    def scores_within_one(self) -> bool:
        """Return whether scores are means or maxima of cosines."""
        return self.config.aggregation in ("mean", "max")

    @property
    def scores_are_probabilities(self) -> bool:
        """Return whether scores end in a sigmoid: with RAR. Those of RCR alone are mean cosines."""
        return self.config.regulator in ("rar", "rcar")

    def score(self, images: Fragments, captions: Fragments) -> Tensor:
        """Score regions and words: (n_images, n_captions) float32, images are rows."""
        scores = []
        if self.text_to_image is not None:
            scores.append(self.text_to_image(captions, images).t())
        if self.image_to_text is not None:
            scores.append(self.image_to_text(images, captions))
        return scores[0] if len(scores) == 1 else (scores[0] + scores[1]) / 2

    @property
    def attention_scores(self) -> AttentionScores | None:
        """Return the cross-attention of the model's directions; None with regulators."""
        return AttentionScores.of(self.text_to_image, self.image_to_text, mean=self.config.direction == "mean")

    def word_attention(self, images: Fragments, captions: Fragments) -> list[Tensor]:
        """Return the attention of caption i over image i for each i, float32 (n_words, n_regions).

        With a regulator it is the last attention. Rows sum to one; the first is that of `<start>`, the last that of
        `<end>`.

        Raises:
            ValueError: the model's words do not attend to regions (direction "i2t"), or there are not equally many
                images and captions.
        """
        if self.text_to_image is None:
            raise ValueError("direction: in this model regions attend to words (i2t), not words to regions")
        return pairwise_weights(self.text_to_image, images, captions)

    def pair_steps(self, images: Fragments, captions: Fragments) -> dict[str, PairSteps]:
        """Return the intermediate results of one image and one caption for each direction of the model.

        Raises:
            ValueError: there is not exactly one image and one caption.
        """
        return pair_steps(images, captions, self.text_to_image, self.image_to_text)
