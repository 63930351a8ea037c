"""SGRAF: similarity graph reasoning and attention filtration (Diao et al., AAAI 2021), with RCAR's RCR or without."""

from __future__ import annotations

import attrs
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.config import setting
from itm_fast.fragments import Fragments
from itm_fast.models.base import register
from itm_fast.models.encoders import BertEncoderConfig, make_caption_encoder, make_image_encoder
from itm_fast.models.fragment_model import FragmentModel
from itm_fast.models.regulators import DEFAULT_STEPS, PairSteps, check_pair, directed_steps, pairwise_weights
from itm_fast.nn.reasoning import RegionSelfAttention, SimilarityReasoning, WordSelfAttention

__all__ = ["SGRAF", "SGRAFConfig"]

# Elements of the alignments, or of the squared differences, of the pairs that are scored together: 64 MB in float32.
_CHUNK_ELEMENTS = 1 << 24


@attrs.frozen(kw_only=True)
class SGRAFConfig(BertEncoderConfig):
    """Settings of SGRAF; the defaults are the published ones."""

    n_regions: int = setting(36, help="Regions per image.", minimum=1)
    word_dropout: float = setting(0.4, help="Dropout on the word vectors during training.", minimum=0, below=1)
    bidirectional: bool = setting(True, help="Use a bidirectional GRU and average its directions, as in the paper.")
    module: str = setting(
        "sgr",
        help="Similarity module: graph reasoning (sgr), attention filtration (saf), or the mean of both scores (mean).",
        choices=("sgr", "saf", "mean"),
    )
    alignment_dim: int = setting(256, help="Width of the alignment vectors.", minimum=1)
    graph_steps: int = setting(3, help="Rounds of graph reasoning.", minimum=1, maximum=64)
    attention_dropout: float = setting(
        0.4, help="Dropout during training in the self-attention of the global vectors.", minimum=0, below=1
    )
    temperature: float = setting(9.0, help="Inverse temperature of the softmax over regions.")
    negative_slope: float = setting(0.1, help="Slope of the clip below zero.")
    regulator: str | None = setting(
        None, help="RCAR regulator of the correspondence (rcr); default: none.", choices=("rcr",)
    )
    steps: int | None = setting(None, help="Steps of the regulator; default: 2.", minimum=1, maximum=64)
    residual_correspondence: bool = setting(
        True, help="Update the factors of the step before in each RCR step, instead of replacing them."
    )


@register
class SGRAF(FragmentModel):
    """Score the alignments of the words and of the global vectors by graph reasoning and attention filtration."""

    name = "sgraf"
    summary = "SGRAF: similarity graph reasoning and attention filtration (Diao et al., AAAI 2021)."
    Config = SGRAFConfig
    scoring_parts = ("region_pool", "word_pool", "similarity")

    def __init__(self, config: SGRAFConfig) -> None:
        super().__init__()
        self.config = config
        if config.regulator is None and config.steps is not None:
            raise ValueError(f"steps: {config.steps} steps of which regulator? Set regulator to rcr")
        self.image_encoder = make_image_encoder(config, no_imgnorm=config.no_imgnorm)
        self.text_encoder = make_caption_encoder(
            config, bidirectional=config.bidirectional, no_txtnorm=config.no_txtnorm
        )
        self.region_pool = RegionSelfAttention(config.embed_dim, config.n_regions, dropout=config.attention_dropout)
        self.word_pool = WordSelfAttention(config.embed_dim, dropout=config.attention_dropout)
        self.similarity = SimilarityReasoning(
            config.embed_dim,
            config.alignment_dim,
            graph_steps=config.graph_steps if config.module in ("sgr", "mean") else 0,
            filtration=config.module in ("saf", "mean"),
            correspondence_steps=(config.steps or DEFAULT_STEPS) if config.regulator == "rcr" else 0,
            temperature=config.temperature,
            negative_slope=config.negative_slope,
            residual_correspondence=config.residual_correspondence,
        )

    def encode_images(self, features: Tensor | Fragments) -> Fragments:
        """Encode region features (n, k, f), or Fragments of rows (N, f), as Fragments of rows (n * k or N, d)."""
        return self.image_encoder(features)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Encode padded token ids (n, L) int64 and lengths (n,) as Fragments of rows (sum of lengths, d)."""
        return self.text_encoder(token_ids, lengths)

    @property
    def scores_are_probabilities(self) -> bool:
        """Return True: a score is that of a sigmoid, or the mean of two."""
        return True

    def score(self, images: Fragments, captions: Fragments) -> Tensor:
        """Score regions and words: (n_images, n_captions) float32 in (0, 1), images are rows.

        In training, the batch normalisation of SAF sees one caption with all images, as in the official code.
        """
        widest = max(self.config.embed_dim, self.config.alignment_dim * max(captions.max_length, 1))
        return F_itm.gradient_sparse_scores(
            self.similarity,
            (images, self.region_pool(images)),
            (captions, self.word_pool(captions)),
            chunk_pairs=max(1, _CHUNK_ELEMENTS // widest),
        )

    def word_attention(self, images: Fragments, captions: Fragments) -> list[Tensor]:
        """Return the attention of caption i over image i for each i, float32 (n_words, n_regions).

        With a regulator it is the last attention.

        Raises:
            ValueError: the numbers of images and captions differ.
        """
        return pairwise_weights(self.similarity.local_alignments, images, captions)

    def pair_steps(self, images: Fragments, captions: Fragments) -> dict[str, PairSteps]:
        """Return the intermediate results of one image and one caption, words to regions; ValueError for more.

        The aggregation has the weights of the global alignment and of the words: the gates of SAF, and in each round of
        SGR the edges into the node of the global alignment, which is the result.
        """
        check_pair(images, captions)
        steps = directed_steps(self.similarity.local_alignments, captions, images, self.score(images, captions))
        sides = (images, self.region_pool(images)), (captions, self.word_pool(captions))
        shares = self.similarity.shares(*sides)
        return {"t2i": attrs.evolve(steps, aggregation={name.upper(): weights for name, weights in shares.items()})}
