"""The encoders that the models share, and their settings.

Inside: `EncoderConfig`, `make_image_encoder`, `make_text_encoder`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
from torch import nn

from itm_fast.config import setting
from itm_fast.nn import ImageEncoder, PatchEncoder, ResidualImageEncoder, TextEncoder

__all__ = ["EncoderConfig", "make_image_encoder", "make_text_encoder"]

_IMAGE_ENCODERS: dict[str, Callable[..., nn.Module]] = {
    "linear": ImageEncoder,
    "residual": ResidualImageEncoder,
    "projected_residual": partial(ResidualImageEncoder, projected=True),
    "patches": PatchEncoder,
}


@attrs.frozen(kw_only=True)
class EncoderConfig:
    """Settings of the encoders; the defaults are those of the first models of the field, VSE++ and SCAN."""

    vocab_size: int = setting(help="Number of words in the vocabulary.", minimum=1)
    feature_dim: int = setting(2048, help="Width of the region features.", minimum=1)
    embed_dim: int = setting(1024, help="Width of the joint space.", minimum=1)
    word_dim: int = setting(300, help="Width of the word vectors.", minimum=1)
    num_layers: int = setting(1, help="Layers of the GRU.", minimum=1, maximum=64)
    word_dropout: float = setting(0.0, help="Dropout on the word vectors in training.", minimum=0, below=1)
    image_encoder: str = setting(
        "linear",
        help="A linear layer over region features; beside it a perceptron with batch normalisation that sees the "
        "features (residual) or what the linear layer makes of them (projected_residual); or a small convolutional "
        "network over raw patches.",
        choices=tuple(_IMAGE_ENCODERS),
    )
    no_imgnorm: bool = setting(False, help="Do not l2-normalise the image embeddings.")
    no_txtnorm: bool = setting(False, help="Do not l2-normalise the text embeddings.")


def make_image_encoder(config: EncoderConfig, *, no_imgnorm: bool) -> nn.Module:
    """The encoder that `config.image_encoder` names: region features to Fragments of region embeddings."""
    return _IMAGE_ENCODERS[config.image_encoder](config.feature_dim, config.embed_dim, no_imgnorm=no_imgnorm)


def make_text_encoder(config: EncoderConfig, *, bidirectional: bool = True, no_txtnorm: bool) -> TextEncoder:
    """Token ids to Fragments of word embeddings."""
    return TextEncoder(
        config.vocab_size,
        config.embed_dim,
        word_dim=config.word_dim,
        num_layers=config.num_layers,
        word_dropout=config.word_dropout,
        bidirectional=bidirectional,
        no_txtnorm=no_txtnorm,
    )
