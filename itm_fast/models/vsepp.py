"""VSE++: one vector per image and per caption (Faghri et al., BMVC 2018): the global baseline."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor, nn

from itm_fast.config import setting
from itm_fast.fragments import Fragments
from itm_fast.models.base import MatchingModel, register
from itm_fast.models.encoders import BertEncoderConfig, make_caption_encoder, make_image_encoder
from itm_fast.nn import (
    ExternalSpacePooling,
    GeneralizedPooling,
    ImageEncoder,
    TextEncoder,
    final_states,
    inner_products,
    l2norm,
    mean_pool,
)
from itm_fast.nn.image_encoder import as_regions, detach_blank_rows, narrowed

__all__ = ["VSEPP", "VSEPPConfig"]


@attrs.frozen(kw_only=True)
class VSEPPConfig(BertEncoderConfig):
    """Settings of VSE++; the defaults are the published ones, with the mean of the regions as the image."""

    bidirectional: bool = setting(
        False, help="Use a bidirectional GRU and average its directions; VSE++ reads forwards."
    )
    image_pooling: str = setting(
        "mean",
        help="Pooling of the regions: mean, generalized pooling (gpo), or external space attention (esa).",
        choices=("mean", "gpo", "esa"),
    )
    text_pooling: str = setting(
        "last",
        help="Pooling of the GRU states: the last state of each direction (last), mean, generalized pooling (gpo), or "
        "external space attention (esa).",
        choices=("last", "mean", "gpo", "esa"),
    )


@register
class VSEPP(MatchingModel):
    """Score the mean of an image's regions and the last GRU state of a caption by their cosine."""

    name = "vsepp"
    summary = "VSE++: one vector per item (Faghri et al., BMVC 2018)."
    Config = VSEPPConfig

    def __init__(self, config: VSEPPConfig) -> None:
        super().__init__()
        self.config = config
        self.image_encoder = make_image_encoder(config, no_imgnorm=True)
        if config.text_encoder == "bert" and config.text_pooling == "last":
            raise ValueError("text_pooling: expected mean, gpo or esa where BERT reads the captions, got last")
        self.text_encoder = make_caption_encoder(config, bidirectional=config.bidirectional, no_txtnorm=True)
        self.image_pool = _learned_pooling(config.image_pooling, config.embed_dim)
        self.text_pool = _learned_pooling(config.text_pooling, config.embed_dim)

    def encode_images(self, features: Tensor | Fragments) -> Tensor:
        """Encode region features (n, k, f), or Fragments of rows (N, f), as (n, d).

        An image without regions becomes zero; generalized pooling raises ValueError for it.
        """
        if self.image_pool is not None:
            images = self.image_pool(self.image_encoder(features))
        elif isinstance(self.image_encoder, ImageEncoder):
            # The mean commutes with a linear layer, which then has one row per image to do.
            regions = as_regions(features, self.config.feature_dim)
            mean = mean_pool(regions)
            fc = self.image_encoder.fc
            images = detach_blank_rows(fc(narrowed(mean, fc.weight)), mean)
            images = images.masked_fill((regions.lengths == 0)[:, None], 0.0)
            # Autocast has rounded it; what normalises and scores one vector an item is float32.
            images = images.to(torch.promote_types(images.dtype, torch.float32))
        else:
            images = mean_pool(self.image_encoder(features))
        return images if self.config.no_imgnorm else l2norm(images)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """Encode padded token ids (n, L) int64 and lengths (n,) as (n, d).

        A caption without words becomes zero; generalized pooling raises ValueError for it.
        """
        if isinstance(self.text_encoder, TextEncoder) and self.config.text_pooling == "last":
            states = self.text_encoder.states(token_ids, lengths)
            captions = final_states(states, bidirectional=self.config.bidirectional)
        else:
            pool = mean_pool if self.text_pool is None else self.text_pool
            captions = pool(self.text_encoder(token_ids, lengths))
        return captions if self.config.no_txtnorm else l2norm(captions)

    @property
    def scores_within_one(self) -> bool:
        """Return whether the embeddings are normalised."""
        return not (self.config.no_imgnorm or self.config.no_txtnorm)

    def score(self, images: Tensor, captions: Tensor) -> Tensor:
        """Score images (n, d) and captions (m, d): (n, m) float32, images are rows."""
        return inner_products(images, captions)


def _learned_pooling(name: str, dim: int) -> nn.Module | None:
    """Return the pooling with weights of that name; None if it has none."""
    if name == "esa":
        return ExternalSpacePooling(dim)
    return GeneralizedPooling() if name == "gpo" else None
