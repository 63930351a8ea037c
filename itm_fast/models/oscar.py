"""OSCAR: a BERT over caption, object tags and regions that scores each pair (Li et al., ECCV 2020)."""

from __future__ import annotations

import attrs
from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast.config import other_default, setting
from itm_fast.data.tagged_images import TaggedImages
from itm_fast.fragments import Fragments
from itm_fast.models.base import MatchingModel, register
from itm_fast.models.encoders import BertConfig, ImageEncoderConfig, image_encoder_of_width
from itm_fast.nn import ImageEncoder
from itm_fast.nn.pair_transformer import INITIAL_DEVIATION, PairTransformer

__all__ = ["OSCAR", "OSCARConfig"]


@attrs.frozen(kw_only=True)
class OSCARConfig(BertConfig, ImageEncoderConfig):
    """Settings of OSCAR; the defaults are the published ones of retrieval with BERT base."""

    vocab_size: int = setting(help="Number of pieces in the vocabulary.", minimum=1)
    feature_dim: int = other_default(ImageEncoderConfig, "feature_dim", 2054)
    tags: bool = setting(False, help="Read the object tags of the images, {split}_tags.txt in the data.")
    image_norm: bool = setting(False, help="Apply layer normalisation to the embedded regions, as VinVL does.")
    text_encoder: str = setting("bert", help="BERT (bert) reads captions and regions.", choices=("bert",))
    bert_dropout: float = setting(
        0.1, help="Dropout in BERT during training. With 0 the backward pass is sparse.", minimum=0, below=1
    )
    probability: bool = setting(False, help="Score by the probability of a match, not by its log-odds.")
    chunk_pairs: int = setting(64, help="Pairs to score at a time; fewer need less memory.", minimum=1)


@register
class OSCAR(MatchingModel):
    """Score a pair by a matching head on the `[CLS]` state of a BERT over the words, object tags and regions.

    Every pair is a forward pass of the transformer. The score is the log-odds of a match, or its probability; both give
    the same ranks.
    """

    name = "oscar"
    summary = "OSCAR: a BERT over caption, tags and regions that scores each pair (Li et al., ECCV 2020)."
    Config = OSCARConfig

    def __init__(self, config: OSCARConfig) -> None:
        super().__init__()
        self.config = config
        self.image_encoder = image_encoder_of_width(config, config.bert_dim, no_imgnorm=True)
        if isinstance(self.image_encoder, ImageEncoder):
            # BERT reads regions beside words, whose embeddings start with this deviation.
            nn.init.normal_(self.image_encoder.fc.weight, std=INITIAL_DEVIATION)
        self.image_norm = nn.LayerNorm(config.bert_dim, eps=1e-12) if config.image_norm else None
        self.text_encoder = PairTransformer(
            config.vocab_size,
            dim=config.bert_dim,
            layers=config.bert_layers,
            heads=config.bert_heads,
            hidden_dim=config.bert_hidden_dim,
            max_length=config.bert_max_length,
            dropout=config.bert_dropout,
            probability=config.probability,
        )

    @property
    def scores_within_one(self) -> bool:
        """Return whether scores are probabilities."""
        return self.config.probability

    @property
    def scores_are_probabilities(self) -> bool:
        """Return whether scores are those of a sigmoid."""
        return self.config.probability

    @property
    def max_caption_length(self) -> int:
        """Return the maximum number of tokens per caption."""
        return self.config.bert_max_length

    @property
    def reads_tags(self) -> bool:
        """Return whether images have object tags."""
        return self.config.tags

    def beside_bert(self) -> dict[str, nn.Module]:
        """Return the modules whose weights OSCAR's and VinVL's pretrained models contain."""
        parts: dict[str, nn.Module] = {"pooler.dense": self.text_encoder.pooler}
        if isinstance(self.image_encoder, ImageEncoder):
            parts["img_embedding"] = self.image_encoder.fc
        if self.image_norm is not None:
            parts["LayerNorm"] = self.image_norm
        return parts

    def encode_images(self, features: Tensor | Fragments | TaggedImages) -> Fragments | tuple[Fragments, Fragments]:
        """Encode region features (n, k, f), or Fragments of rows (N, f), as Fragments of rows (n * k or N, d).

        With the setting `tags`, `TaggedImages` become these and the embedded tags.

        Raises:
            ValueError: there are tags, but the model does not read them, or the other way round.
        """
        if isinstance(features, TaggedImages) != self.config.tags:
            expected = "TaggedImages" if self.config.tags else "regions without tags"
            raise ValueError(f"features: expected {expected} with the setting tags {self.config.tags}")
        regions = self.image_encoder(features.regions if isinstance(features, TaggedImages) else features)
        rows = regions.values if self.image_norm is None else self.image_norm(regions.values)
        regions = regions.with_values(self.text_encoder.dropout(rows))
        if not isinstance(features, TaggedImages):
            return regions
        return regions, self.text_encoder.embed_tags(features.tag_ids, features.tag_lengths)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Embed padded piece ids (n, L) int64 and lengths (n,) as Fragments of rows (sum of lengths, d)."""
        return self.text_encoder.embed_captions(token_ids, lengths)

    def score(self, images: Fragments | tuple[Fragments, Fragments], captions: Fragments) -> Tensor:
        """Score each pair by a forward pass: (n_images, n_captions) float32, images are rows.

        In training with dropout, the backward pass computes all pairs of a chunk again if one of them has a gradient.
        """
        pairs = self.text_encoder.pairs(tags=self.config.tags)
        return F_itm.gradient_sparse_scores(pairs, images, captions, chunk_pairs=self.config.chunk_pairs)
