"""CAMP: cross-modal adaptive message passing (Wang et al., ICCV 2019), with RCAR's regulators or without.

RCAR's paper reports CAMP with regulators (Table II), but not where they attach. Here RCR regulates the attention of
both directions, which starts from a temperature of 1, and RAR replaces the pooling of regions and words after the
fusion.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.config import other_default, setting
from itm_fast.fragments import Fragments
from itm_fast.models.base import register
from itm_fast.models.encoders import make_caption_encoder, make_image_encoder
from itm_fast.models.fragment_model import FragmentModel
from itm_fast.models.regulators import PairSteps, RegulatorConfig, check_pair, pairwise_weights, steps_of
from itm_fast.nn import MessagePassing

__all__ = ["CAMP", "CAMPConfig"]

# Elements of the messages of the pairs that are scored together: 64 MB in float32.
_CHUNK_ELEMENTS = 1 << 24


@attrs.frozen(kw_only=True)
class CAMPConfig(RegulatorConfig):
    """Settings of CAMP; the defaults are those of the authors' code."""

    no_imgnorm: bool = other_default(RegulatorConfig, "no_imgnorm", True)
    no_txtnorm: bool = other_default(RegulatorConfig, "no_txtnorm", True)
    bidirectional: bool = setting(True, help="Use a bidirectional GRU and average its directions.")
    head: str = setting(
        "sigmoid",
        help="Score: a perceptron with a sigmoid on the fused features (sigmoid), or the cosine of the pooled messages "
        "without fusion (cosine), the first stage of the authors' training.",
        choices=("sigmoid", "cosine"),
    )
    fusion: str = setting(
        "concat", help="Fusion of a feature with its message: concatenate or add them.", choices=("concat", "sum")
    )
    message_attention: bool = setting(
        True,
        help="Let messages attend to each other before the fusion, with separate queries and keys, as in the "
        "experiments of the authors' code.",
    )
    pooling_heads: int = setting(4, help="Heads of the attention that pools regions and words.", minimum=1)


@register
class CAMP(FragmentModel):
    """Pass messages between regions and words, fuse them with gates, and score the pooled features of a pair."""

    name = "camp"
    summary = "CAMP: cross-modal adaptive message passing, gated fusion (Wang et al., ICCV 2019)."
    Config = CAMPConfig
    scoring_parts = ("similarity",)

    def __init__(self, config: CAMPConfig) -> None:
        super().__init__()
        self.config = config
        self.image_encoder = make_image_encoder(config, no_imgnorm=config.no_imgnorm)
        self.text_encoder = make_caption_encoder(
            config, bidirectional=config.bidirectional, no_txtnorm=config.no_txtnorm
        )
        correspondence_steps, aggregation_steps = steps_of(config)
        self.similarity = MessagePassing(
            config.embed_dim,
            message_attention=config.message_attention,
            head=config.head,
            fusion=config.fusion,
            heads=config.pooling_heads,
            correspondence_steps=correspondence_steps,
            aggregation_steps=aggregation_steps,
            alignment_dim=config.alignment_dim,
            dropout=config.regulator_dropout,
            residual_correspondence=config.residual_correspondence,
            residual_aggregation=config.residual_aggregation,
        )

    def encode_images(self, features: Tensor | Fragments) -> Fragments:
        """Encode region features (n, k, f), or Fragments of rows (N, f), as Fragments of rows (n * k or N, d)."""
        return self.image_encoder(features)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Encode padded token ids (n, L) int64 and lengths (n,) as Fragments of rows (sum of lengths, d)."""
        return self.text_encoder(token_ids, lengths)

    @property
    def scores_are_probabilities(self) -> bool:
        """Return whether the head ends in a sigmoid."""
        return self.config.head == "sigmoid"

    def score(self, images: Fragments, captions: Fragments) -> Tensor:
        """Score regions and words: (n_images, n_captions) float32, in (0, 1) with the sigmoid; images are rows."""
        rows = max(images.max_length + captions.max_length, 1)
        return F_itm.gradient_sparse_scores(
            self.similarity, images, captions, chunk_pairs=max(1, _CHUNK_ELEMENTS // (rows * self.config.embed_dim))
        )

    def word_attention(self, images: Fragments, captions: Fragments) -> list[Tensor]:
        """Return the attention of caption i over image i for each i, float32 (n_words, n_regions).

        With RCR it is the last attention.

        Raises:
            ValueError: the numbers of images and captions differ.
        """
        return pairwise_weights(self.similarity, images, captions)

    def pair_steps(self, images: Fragments, captions: Fragments) -> dict[str, PairSteps]:
        """Return the intermediate results of one image and one caption in both directions; ValueError for more.

        The aggregation has the weights of the fused words and regions in the pooled features, for each step of RAR if
        there is RAR. The score of a direction is that of the pair.
        """
        check_pair(images, captions)
        score = self.score(images, captions)[0, 0]
        name = "Pooling" if self.similarity.to_words.aggregation is None else "RAR"
        with torch.autocast(images.device.type, enabled=False):
            both = self.similarity.steps(captions[0].float(), images[0].float())
        return {
            direction: PairSteps(steps.attention, steps.temperatures, {name: steps.aggregation}, score)
            for direction, steps in both.items()
        }
