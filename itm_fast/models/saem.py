"""SAEM: self-attention embeddings of regions and of words (Wu et al., ACM MM 2019).

"Learning Fragment Self-Attention Embeddings for Image-Text Matching". The sizes of the layer over regions are those of
BERT: a head per 64 channels, and a perceptron of four times the width. The official code reads them from a file. It
also adds an angular loss and a penalty on the norms of the image encoder's weights. The weight of the angular loss
(`angular_weight`) is divided by 10 every five epochs, and is 0 after 21 epochs. The penalty is left out here;
`--weight-decay` has the same purpose.
"""

from __future__ import annotations

import attrs
from torch import Tensor, nn

from itm_fast.config import other_default, setting
from itm_fast.fragments import Fragments
from itm_fast.models.base import MatchingModel, register
from itm_fast.models.encoders import BertEncoderConfig, make_bert_encoder, make_image_encoder, make_text_encoder
from itm_fast.nn import (
    AngularLoss,
    BertTextEncoder,
    PhrasePooling,
    SelfAttentionLayer,
    TextEncoder,
    inner_products,
    l2norm,
    mean_pool,
)

__all__ = ["SAEM", "SAEMConfig"]


@attrs.frozen(kw_only=True)
class SAEMConfig(BertEncoderConfig):
    """Settings of SAEM; the defaults are the published ones, except that a GRU reads the captions without BERT."""

    embed_dim: int = other_default(BertEncoderConfig, "embed_dim", 256)
    bidirectional: bool = setting(True, help="Use a bidirectional GRU and average its directions.")
    freeze_bert: bool = setting(True, help="Keep BERT's weights as they are, as the authors' code does.")
    attention_layers: int = setting(1, help="Layers of self-attention over regions.", minimum=1, maximum=64)
    attention_heads: int = setting(4, help="Heads of the self-attention over regions.", minimum=1)
    attention_hidden_dim: int = setting(
        1024, help="Width of the perceptron in the self-attention over regions.", minimum=1
    )
    attention_dropout: float = setting(
        0.1, help="Dropout during training in the self-attention over regions.", minimum=0, below=1
    )
    phrase_channels: int = setting(
        512, help="Channels of each convolution over phrases of 1, 2 and 3 words.", minimum=1
    )
    angular_weight: float = setting(
        0.0,
        help="Weight of the angular loss in the first five epochs; it is divided by 10 every five epochs, and is 0 "
        "after 21 epochs. The authors' code takes 0.5.",
        minimum=0,
    )
    phrase_dropout: float = setting(
        0.1, help="Dropout during training on the maxima of the convolutions.", minimum=0, below=1
    )


# Of the weight of the angular loss, in epochs.
_DECAY_EVERY, _LAST_EPOCH = 5, 20


@register
class SAEM(MatchingModel):
    """Score the mean of an image's regions after self-attention with the strongest phrases of a caption, by cosine."""

    name = "saem"
    summary = "SAEM: self-attention over regions, convolutions over words, one vector per item (Wu et al., MM 2019)."
    Config = SAEMConfig

    def __init__(self, config: SAEMConfig) -> None:
        super().__init__()
        self.config = config
        if config.embed_dim % config.attention_heads:
            raise ValueError(
                f"attention_heads: expected a divisor of embed_dim {config.embed_dim}, got {config.attention_heads}"
            )
        self.image_encoder = make_image_encoder(config, no_imgnorm=True)
        self.region_layers = nn.Sequential(
            *(
                SelfAttentionLayer(
                    config.embed_dim,
                    heads=config.attention_heads,
                    hidden_dim=config.attention_hidden_dim,
                    dropout=config.attention_dropout,
                )
                for _ in range(config.attention_layers)
            )
        )
        self.text_encoder: BertTextEncoder | TextEncoder
        if config.text_encoder == "bert":
            # The convolutions see BERT's states as they are.
            self.text_encoder = make_bert_encoder(config, no_txtnorm=True, projected=False)
            self.text_encoder.requires_grad_(not config.freeze_bert)
        else:
            self.text_encoder = make_text_encoder(config, bidirectional=config.bidirectional, no_txtnorm=True)
        self.phrases = PhrasePooling(
            config.bert_dim if config.text_encoder == "bert" else config.embed_dim,
            config.embed_dim,
            channels=config.phrase_channels,
            dropout=config.phrase_dropout,
        )
        if config.angular_weight and (config.no_imgnorm or config.no_txtnorm):
            raise ValueError("angular_weight: needs l2-normalised embeddings, without no_imgnorm and no_txtnorm")
        self.angular = AngularLoss()
        self._auxiliary: Tensor | None = None

    def encode_images(self, features: Tensor | Fragments) -> Tensor:
        """Encode region features (n, k, f), or Fragments of rows (N, f), as (n, d); zero for one without regions."""
        images = mean_pool(self.region_layers(self.image_encoder(features)))
        return images if self.config.no_imgnorm else l2norm(images)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """Encode padded token ids (n, L) int64 and lengths (n,) as (n, d); a caption without words becomes zero."""
        captions = self.phrases(self.text_encoder(token_ids, lengths))
        return captions if self.config.no_txtnorm else l2norm(captions)

    @property
    def auxiliary_setting(self) -> str | None:
        """Return "angular_weight" if the angular loss is added."""
        return "angular_weight" if self.config.angular_weight else None

    def take_auxiliary_loss(self) -> Tensor | None:
        """Return the weighted angular loss of the last batch, and forget it."""
        loss, self._auxiliary = self._auxiliary, None
        return loss

    def auxiliary_factor(self, epoch: int) -> float:
        """Return the decay of the angular loss."""
        return 0.1 ** (epoch // _DECAY_EVERY) if epoch <= _LAST_EPOCH else 0.0

    def forward(
        self, features: Tensor | Fragments, token_ids: Tensor, lengths: Tensor, micro_batch: int | None = None
    ) -> Tensor:
        """Score all images with all captions, as `MatchingModel.forward`; in training also keep the angular loss."""
        images, captions = self.encode(features, token_ids, lengths, micro_batch)
        if self.training and self.config.angular_weight:
            self._auxiliary = self.config.angular_weight * self.angular(images, captions)
        scores: Tensor = self.score(images, captions)
        return scores

    @property
    def scores_within_one(self) -> bool:
        """Return whether the embeddings are normalised."""
        return not (self.config.no_imgnorm or self.config.no_txtnorm)

    def score(self, images: Tensor, captions: Tensor) -> Tensor:
        """Score images (n, d) and captions (m, d): (n, m) float32, images are rows."""
        return inner_products(images, captions)
