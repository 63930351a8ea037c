"""The encoders that the models share, and their settings.

Inside: `EncoderConfig`, `make_image_encoder`, `make_text_encoder`; `BertEncoderConfig`, `make_bert_encoder`,
`make_caption_encoder`; `ImageEncoderConfig`, `BertConfig`, `image_encoder_of_width`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
from torch import nn

from itm_fast.config import setting
from itm_fast.nn import (
    BackboneEncoder,
    BertTextEncoder,
    ImageEncoder,
    PatchEncoder,
    ResidualImageEncoder,
    TextEncoder,
)

__all__ = [
    "BertConfig",
    "BertEncoderConfig",
    "EncoderConfig",
    "ImageEncoderConfig",
    "image_encoder_of_width",
    "make_bert_encoder",
    "make_caption_encoder",
    "make_image_encoder",
    "make_text_encoder",
]

_IMAGE_ENCODERS: dict[str, Callable[..., nn.Module]] = {
    "linear": ImageEncoder,
    "residual": ResidualImageEncoder,
    "projected_residual": partial(ResidualImageEncoder, projected=True),
    "mlp": partial(ResidualImageEncoder, projected=True, residual=False),
    "patches": PatchEncoder,
}
_WITH_NORMS = ("residual", "projected_residual", "mlp")


@attrs.frozen(kw_only=True)
class ImageEncoderConfig:
    """Settings of the image encoder, except the width of its embeddings."""

    feature_dim: int = setting(2048, help="Width of the region features.", minimum=1)
    image_encoder: str = setting(
        "linear",
        help="Image encoder: a linear layer on region features (linear); with a perceptron and batch normalisation on "
        "the features (residual) or on the projected features (projected_residual) added, or after it (mlp); a "
        "small convolutional network over patches of pixels (patches); or a vision model (backbone).",
        choices=(*_IMAGE_ENCODERS, "backbone"),
    )
    image_norms: int = setting(
        1,
        help="Batch normalisations in the perceptron of residual, projected_residual and mlp: 1 behind the hidden "
        "layer, as in official code; 2 also behind the output, as Figure 9 of RVSE++ draws.",
        minimum=1,
        maximum=2,
    )
    image_backbone: Mapping[str, Any] = setting(
        factory=dict,
        help="Vision model for image_encoder backbone: its config, and mean and std of the pixels. "
        "itm-fast train --image-backbone DIR sets it.",
    )
    image_class_token: bool = setting(False, help="Keep the class token of the vision model as the first region.")


# With slots, it could not be one of two bases of a class.
@attrs.frozen(kw_only=True, slots=False)
class BertConfig:
    """Sizes of BERT; the defaults are those of BERT base."""

    bert_dim: int = setting(768, help="Width of BERT's hidden states.", minimum=1)
    bert_layers: int = setting(12, help="Layers of BERT.", minimum=1, maximum=256)
    bert_heads: int = setting(12, help="Attention heads of BERT.", minimum=1)
    bert_hidden_dim: int = setting(3072, help="Width of BERT's perceptrons.", minimum=1)
    bert_max_length: int = setting(512, help="Maximum caption length in tokens for BERT.", minimum=2)
    bert_dropout: float = setting(0.1, help="Dropout in BERT during training.", minimum=0, below=1)


@attrs.frozen(kw_only=True)
class EncoderConfig(ImageEncoderConfig):
    """Settings of the encoders; the defaults are those of the first models of the field, VSE++ and SCAN."""

    vocab_size: int = setting(help="Number of words in the vocabulary.", minimum=1)
    embed_dim: int = setting(1024, help="Width of the joint space.", minimum=1)
    word_dim: int = setting(300, help="Width of the word vectors.", minimum=1)
    num_layers: int = setting(1, help="Layers of the GRU.", minimum=1, maximum=64)
    word_dropout: float = setting(0.0, help="Dropout on the word vectors during training.", minimum=0, below=1)
    no_imgnorm: bool = setting(False, help="Do not l2-normalise the image embeddings.")
    no_txtnorm: bool = setting(False, help="Do not l2-normalise the text embeddings.")


@attrs.frozen(kw_only=True)
class BertEncoderConfig(BertConfig, EncoderConfig):
    """Settings of models with a GRU or BERT as text encoder; `itm-fast train --bert DIR` sets those of BERT."""

    text_encoder: str = setting(
        "gru", help="Text encoder: a GRU over word vectors (gru), or BERT (bert).", choices=("gru", "bert")
    )


def make_image_encoder(config: EncoderConfig, *, no_imgnorm: bool) -> nn.Module:
    """Create the image encoder named by `config.image_encoder`: region features to Fragments of embeddings."""
    return image_encoder_of_width(config, config.embed_dim, no_imgnorm=no_imgnorm)


def image_encoder_of_width(config: ImageEncoderConfig, embed_dim: int, *, no_imgnorm: bool) -> nn.Module:
    """Create the image encoder with embeddings of width `embed_dim`; see `make_image_encoder`."""
    if config.image_norms != 1 and config.image_encoder not in _WITH_NORMS:
        raise ValueError(
            f"image_norms: goes with the image_encoder {' or '.join(_WITH_NORMS)}, not {config.image_encoder}"
        )
    if config.image_encoder == "backbone":
        return BackboneEncoder(
            config.feature_dim,
            embed_dim,
            config.image_backbone,
            class_token=config.image_class_token,
            no_imgnorm=no_imgnorm,
        )
    if config.image_backbone or config.image_class_token:
        name = "image_backbone" if config.image_backbone else "image_class_token"
        raise ValueError(f"{name}: expected only with image_encoder backbone, got {config.image_encoder}")
    norms = {"norms": config.image_norms} if config.image_encoder in _WITH_NORMS else {}
    return _IMAGE_ENCODERS[config.image_encoder](config.feature_dim, embed_dim, no_imgnorm=no_imgnorm, **norms)


def make_text_encoder(config: EncoderConfig, *, bidirectional: bool = True, no_txtnorm: bool) -> TextEncoder:
    """Create a text encoder: token ids to Fragments of word embeddings."""
    return TextEncoder(
        config.vocab_size,
        config.embed_dim,
        word_dim=config.word_dim,
        num_layers=config.num_layers,
        word_dropout=config.word_dropout,
        bidirectional=bidirectional,
        no_txtnorm=no_txtnorm,
    )


def make_caption_encoder(
    config: BertEncoderConfig, *, bidirectional: bool, no_txtnorm: bool
) -> TextEncoder | BertTextEncoder:
    """Create the text encoder named by `config.text_encoder`: token ids to Fragments of embeddings."""
    if config.text_encoder == "bert":
        return make_bert_encoder(config, no_txtnorm=no_txtnorm)
    return make_text_encoder(config, bidirectional=bidirectional, no_txtnorm=no_txtnorm)


def make_bert_encoder(config: BertEncoderConfig, *, no_txtnorm: bool, projected: bool = True) -> BertTextEncoder:
    """Create a BERT encoder with random weights: token ids of a `BertVocabulary` to Fragments of embeddings.

    Unless `projected`, the embeddings are BERT's states.
    """
    return BertTextEncoder(
        config.vocab_size,
        config.embed_dim if projected else None,
        bert_dim=config.bert_dim,
        layers=config.bert_layers,
        heads=config.bert_heads,
        hidden_dim=config.bert_hidden_dim,
        max_length=config.bert_max_length,
        dropout=config.bert_dropout,
        no_txtnorm=no_txtnorm,
    )
