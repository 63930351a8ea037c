"""FDF around a host: N conversions of one extracted feature replace the host's encoder heads.

Source: Zhou et al., "Achieving Ensemble-Like Performance in a Single Model: A Feature Diversification Framework for
Image-Text Matching" (AAAI 2025); see `itm_fast.nn.feature_diversification` for how we read its equations.

The host is split into extractor and heads. The base features of an image are its regions, or with
`image_encoder: patches` the input of the last convolution for each patch, and with `image_encoder: backbone` the
tokens of the vision model. Those of a caption are the states of its GRU or BERT. The layers of the host above them
(linear layer, perceptron, attention over regions, pooling) become part of each conversion; a GRU has none. The host's
similarity scores the fused features. Outside of training, only the fused features are used.
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
from itm_fast.nn import BackboneEncoder, BertTextEncoder, FeatureDiversification, PatchEncoder, TextEncoder
from itm_fast.nn.feature_diversification import CONVERSIONS
from itm_fast.nn.image_encoder import as_regions

__all__ = ["FDF", "FDF_HOSTS", "FDFConfig"]

FDF_HOSTS = ("chan", "scan", "vse_infty")


@attrs.frozen(kw_only=True)
class FDFConfig:
    """Settings of the feature conversions and their host; `itm-fast train --conversions N` creates them."""

    host: str = setting(help="Host model, whose encoder heads the conversions replace.", choices=FDF_HOSTS)
    host_options: Mapping[str, Any] = setting(factory=dict, help="Settings of the host by name.")
    conversions: int = setting(8, help="Number N of feature conversions.", minimum=1, maximum=64)
    conversion: str = setting(
        "ffn",
        help="Layer of each conversion above the encoder head: a feed-forward network, an adapter, or none.",
        choices=CONVERSIONS,
    )
    conversion_residual: bool = setting(
        False, help="Add the input of the feed-forward network to its output; itm-fast train turns this on."
    )
    reweighting: bool = setting(
        True, help="Learn the weights of the conversions for each feature, instead of averaging them."
    )
    normalize_fused: bool = setting(True, help="L2-normalise the weighted sum of the conversions.")


@register
class FDF(FragmentModel):
    """A host model whose embeddings are the fused features of N conversions.

    Attributes: `image_encoder` (None if regions come from the data) and `text_encoder`, the extractors; `images` and
    `captions`, the conversions of each side; `host`, the host without its encoders.
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
        if getattr(of_host, "image_norms", 1) != 1:
            raise ValueError(f"image_norms: expected 1 with feature conversions, got {of_host.image_norms}")
        for name in ("image_pooling", "text_pooling") if pooled else ():
            if getattr(of_host, name) not in ("mean", "gpo"):
                found = getattr(of_host, name)
                raise ValueError(f"{name}: expected mean or gpo with feature conversions, got {found}")

        extractor: nn.Module = host.get_submodule("image_encoder")
        self.image_encoder = extractor if isinstance(extractor, PatchEncoder | BackboneEncoder) else None
        head, width = of_host.image_encoder, of_host.feature_dim
        if isinstance(extractor, PatchEncoder):
            head, width = "linear", extractor.neighbourhood_dim
            extractor.layers[-1] = nn.Identity()
        elif isinstance(extractor, BackboneEncoder):
            head, width = "linear", extractor.width
            del extractor.fc
        self.images = self._diversification(
            head,
            width,
            of_host.embed_dim,
            of_host.image_pooling if pooled else None,
            attention=getattr(of_host, "region_attention", False),
        )

        words: nn.Module = host.get_submodule("text_encoder")
        head, width = "identity", of_host.embed_dim
        if isinstance(words, BertTextEncoder):
            head, width = "linear", of_host.bert_dim
            del words.fc
        elif isinstance(words, TextEncoder):
            words.no_txtnorm = True
        self.text_encoder = words
        self.captions = self._diversification(head, width, of_host.embed_dim, of_host.text_pooling if pooled else None)

        for name in ("image_encoder", "text_encoder", "image_pool", "text_pool", "region_attention"):
            if hasattr(host, name):
                setattr(host, name, None)
        self.host = host

    def _diversification(
        self, head: str, width: int, embed_dim: int, pooling: str | None, *, attention: bool = False
    ) -> FeatureDiversification:
        return FeatureDiversification(
            self.config.conversions,
            width,
            embed_dim,
            head=head,
            conversion=self.config.conversion,
            residual=self.config.conversion_residual,
            attention=attention,
            pooling=pooling,
            reweighting=self.config.reweighting,
            normalize_fused=self.config.normalize_fused,
        )

    @property
    def encoder_config(self) -> Any:
        return self.host.config

    @property
    def yields_fragments(self) -> bool:
        """Return whether the host compares fragments."""
        return isinstance(self.host, FragmentModel)

    @property
    def normalized_embeddings(self) -> tuple[bool, bool]:
        return self.config.normalize_fused, self.config.normalize_fused

    def first_image_weight(self) -> nn.Parameter:
        # A pretrained vision model may be frozen.
        own = self.image_encoder.parameters() if isinstance(self.image_encoder, PatchEncoder) else ()
        parameters = itertools.chain(own, self.images.parameters())
        return next(parameters)

    def base_images(self, features: Tensor | Fragments) -> Fragments:
        """Return base features, rows (n * k or N, any width), of (n, k, f) or Fragments of rows (N, f)."""
        if isinstance(self.image_encoder, PatchEncoder):
            return self.image_encoder.neighbourhoods(features)
        if isinstance(self.image_encoder, BackboneEncoder):
            return self.image_encoder.states(features)
        return as_regions(features, self.host.config.feature_dim)

    def base_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Return base features, rows (sum of lengths, any width), of token ids (n, L) int64 and lengths (n,)."""
        if isinstance(self.text_encoder, BertTextEncoder):
            return self.text_encoder.states(token_ids, lengths)
        states: Fragments = self.text_encoder(token_ids, lengths)
        return states

    def encode_images(self, features: Tensor | Fragments) -> Fragments | Tensor:
        """Encode region features (n, k, f), or Fragments of rows (N, f), as fused embeddings of n images."""
        fused: Fragments | Tensor = self.images(self.base_images(features))
        return fused

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments | Tensor:
        """Encode padded token ids (n, L) int64 and lengths (n,) as fused embeddings of n captions."""
        fused: Fragments | Tensor = self.captions(self.base_captions(token_ids, lengths))
        return fused

    @property
    def scores_within_one(self) -> bool:
        """Return what the host returns."""
        return self.host.scores_within_one

    @property
    def scores_are_probabilities(self) -> bool:
        """Return what the host returns."""
        return self.host.scores_are_probabilities

    def score(self, images: Any, captions: Any) -> Tensor:
        """Score embeddings by the host's similarity: (n_images, n_captions), images are rows."""
        return self.host.score(images, captions)

    def pair_scores(self, images: Any, captions: Any, *, block: int = 8) -> Tensor:
        """Score image i with caption i by the host's similarity: (n,), for n images and n captions.

        The similarity is an operator over all pairs, so `block` images are scored with `block` captions at a time.
        """
        if len(images) != len(captions):
            raise ValueError(f"captions: expected one for each of {len(images)} images, got {len(captions)}")
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
    """Split embeddings into blocks of `size` sets: views, so that their gradients are joined only once."""
    if not isinstance(embeddings, Fragments):
        return embeddings.split(size)
    starts, offsets = range(0, max(len(embeddings), 1), size), embeddings.offsets
    bounds = offsets[[*starts, len(embeddings)]]
    rows = embeddings.values.split(bounds.diff().tolist())
    return [
        Fragments(own, offsets[start : start + size + 1] - bound, check=False)
        for own, start, bound in zip(rows, starts, bounds[:-1], strict=True)
    ]
