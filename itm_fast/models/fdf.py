"""FDF around a host: N conversions of one extracted feature in the place of the host's encoder heads.

Source: Zhou et al., "Achieving Ensemble-Like Performance in a Single Model: A Feature Diversification Framework for
Image-Text Matching" (AAAI 2025); the readings of its equations stand in `itm_fast.nn.feature_diversification`. Split
into extractor and heads: base features of an image are its regions as they come (with `image_encoder` patches what the
last convolution sees of each patch), those of a caption the states of its GRU or of BERT. What the host has above, a
linear layer, a perceptron, pooling, becomes part of each conversion; above a GRU that is nothing. The host's similarity
scores fused features, which alone are used outside of training.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from itm_fast.config import setting
from itm_fast.fragments import Fragments
from itm_fast.models.base import create, register
from itm_fast.models.fragment_model import FragmentModel
from itm_fast.nn import BertTextEncoder, FeatureDiversification, PatchEncoder, TextEncoder
from itm_fast.nn.feature_diversification import CONVERSIONS
from itm_fast.nn.image_encoder import as_regions

__all__ = ["FDF", "FDF_HOSTS", "FDFConfig"]

FDF_HOSTS = ("chan", "scan", "vse_infty")


@attrs.frozen(kw_only=True)
class FDFConfig:
    """Settings of the feature conversions and of their host; `itm-fast train --conversions N` makes them."""

    host: str = setting(help="Host model, whose encoder heads the conversions replace.", choices=FDF_HOSTS)
    host_options: Mapping[str, Any] = setting(factory=dict, help="Settings of the host by name.")
    conversions: int = setting(8, help="Number N of feature conversions.", minimum=1, maximum=64)
    conversion: str = setting(
        "ffn",
        help="Layer of each conversion above the encoder head: a feed-forward network, an adapter, or none.",
        choices=CONVERSIONS,
    )
    conversion_residual: bool = setting(False, help="Add the input of the feed-forward network to its output.")
    reweighting: bool = setting(
        True, help="Learn the weights of the conversions for each feature, instead of averaging them."
    )
    normalize_fused: bool = setting(True, help="L2-normalise the weighted sum of the conversions.")


@register
class FDF(FragmentModel):
    """A host whose embeddings are the fused feature of N conversions.

    Attributes: `image_encoder` (None where regions come from the data) and `text_encoder`, the extractors; `images` and
    `captions`, the conversions of either side; `host`, whose encoders are taken out of it.
    """

    name = "fdf"
    summary = "FDF around chan, scan or vse_infty; train --conversions N makes it (Zhou et al., AAAI 2025)."
    Config = FDFConfig

    def __init__(self, config: FDFConfig) -> None:
        super().__init__()
        self.config = config
        host = create(config.host, **config.host_options)
        of_host = host.config
        pooled = config.host == "vse_infty"
        for name in ("no_imgnorm", "no_txtnorm"):
            if getattr(of_host, name):
                raise ValueError(f"{name}: feature conversions are l2-normalised, and take no true")
        if pooled and of_host.text_pooling == "last":
            raise ValueError("text_pooling: expected mean or gpo with feature conversions, got last")

        extractor: nn.Module = host.get_submodule("image_encoder")
        self.image_encoder = extractor if isinstance(extractor, PatchEncoder) else None
        head, width = of_host.image_encoder, of_host.feature_dim
        if isinstance(extractor, PatchEncoder):
            head, width = "linear", extractor.neighbourhood_dim
            extractor.layers[-1] = nn.Identity()
        self.images = self._diversification(head, width, of_host.embed_dim, of_host.image_pooling if pooled else None)

        words: nn.Module = host.get_submodule("text_encoder")
        head, width = "identity", of_host.embed_dim
        if isinstance(words, BertTextEncoder):
            head, width = "linear", of_host.bert_dim
            del words.fc
        elif isinstance(words, TextEncoder):
            words.no_txtnorm = True
        self.text_encoder = words
        self.captions = self._diversification(head, width, of_host.embed_dim, of_host.text_pooling if pooled else None)

        for name in ("image_encoder", "text_encoder", "image_pool", "text_pool"):
            if hasattr(host, name):
                setattr(host, name, None)
        self.host = host

    def _diversification(self, head: str, width: int, embed_dim: int, pooling: str | None) -> FeatureDiversification:
        return FeatureDiversification(
            self.config.conversions,
            width,
            embed_dim,
            head=head,
            conversion=self.config.conversion,
            residual=self.config.conversion_residual,
            pooling=pooling,
            reweighting=self.config.reweighting,
            normalize_fused=self.config.normalize_fused,
        )

    @property
    def encoder_config(self) -> Any:
        return self.host.config

    @property
    def yields_fragments(self) -> bool:
        """Those of a host that compares fragments, fused."""
        return isinstance(self.host, FragmentModel)

    @property
    def normalized_embeddings(self) -> tuple[bool, bool]:
        return self.config.normalize_fused, self.config.normalize_fused

    def first_image_weight(self) -> nn.Parameter:
        parameters = itertools.chain(
            () if self.image_encoder is None else self.image_encoder.parameters(), self.images.parameters()
        )
        return next(parameters)

    @property
    def max_caption_length(self) -> int | None:
        return self.text_encoder.max_length if isinstance(self.text_encoder, BertTextEncoder) else None

    def base_images(self, features: Tensor | Fragments) -> Fragments:
        """Region features (n, k, f), or Fragments of rows (N, f), to base features, rows (n * k or N, any width)."""
        if isinstance(self.image_encoder, PatchEncoder):
            return self.image_encoder.neighbourhoods(features)
        return as_regions(features, self.host.config.feature_dim)

    def base_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Padded token ids (n, L) int64 and lengths (n,) to base features, rows (sum of lengths, any width)."""
        if isinstance(self.text_encoder, BertTextEncoder):
            return self.text_encoder.states(token_ids, lengths)
        states: Fragments = self.text_encoder(token_ids, lengths)
        return states

    def encode_images(self, features: Tensor | Fragments) -> Fragments | Tensor:
        """Region features (n, k, f), or Fragments of rows (N, f), to the host's embeddings of n images, fused."""
        fused: Fragments | Tensor = self.images(self.base_images(features))
        return fused

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments | Tensor:
        """Padded token ids (n, L) int64 and lengths (n,) to the host's embeddings of n captions, fused."""
        fused: Fragments | Tensor = self.captions(self.base_captions(token_ids, lengths))
        return fused

    @property
    def scores_within_one(self) -> bool:
        """As those of the host."""
        return self.host.scores_within_one

    def score(self, images: Any, captions: Any) -> Tensor:
        """The host's scores (n_images, n_captions) of embeddings."""
        return self.host.score(images, captions)

    def pair_scores(self, images: Any, captions: Any, *, block: int = 8) -> Tensor:
        """The host's scores (n,) of image i with caption i, for embeddings of n of each.

        Pairs are scored `block` at a time, all images of a block with all its captions: the similarity of a host is an
        operator over all pairs.
        """
        blocks = zip(_blocks(images, block), _blocks(captions, block), strict=True)
        return torch.cat([self.score(*of_both).diagonal() for of_both in blocks])

    @property
    def word_attention(self) -> Any:
        """As the host's, on fused embeddings; an AttributeError where it has none."""
        return self.host.word_attention

    @property
    def pair_steps(self) -> Any:
        """As the host's, on fused embeddings; an AttributeError where it has none."""
        return self.host.pair_steps


def _blocks(embeddings: Fragments | Tensor, size: int) -> Sequence[Fragments | Tensor]:
    """Embeddings of one set after the other, `size` sets at a time: views, whose gradients are put together once."""
    if not isinstance(embeddings, Fragments):
        return embeddings.split(size)
    starts, offsets = range(0, max(len(embeddings), 1), size), embeddings.offsets
    bounds = offsets[[*starts, len(embeddings)]]
    rows = embeddings.values.split(bounds.diff().tolist())
    return [
        Fragments(own, offsets[start : start + size + 1] - bound, check=False)
        for own, start, bound in zip(rows, starts, bounds[:-1], strict=True)
    ]
