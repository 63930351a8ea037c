"""VSRN: visual semantic reasoning (Li et al., ICCV 2019).

The paper's second branch generates captions during training: `caption_weight` turns it on. Each region is
l2-normalised, as in the paper; the official code normalises each channel over the regions of an image.
"""

from __future__ import annotations

import attrs
from torch import Tensor, nn

from itm_fast.config import other_default, setting
from itm_fast.fragments import Fragments
from itm_fast.models.base import register
from itm_fast.models.encoders import EncoderConfig, make_image_encoder, make_text_encoder
from itm_fast.models.fragment_model import Encoded, FragmentModel
from itm_fast.nn import (
    CaptionDecoder,
    RegionReader,
    RegionReasoning,
    final_states,
    inner_products,
    l2norm,
    micro_batches,
)
from itm_fast.nn.residual_image_encoder import RowNorm

__all__ = ["VSRN", "VSRNConfig"]


@attrs.frozen(kw_only=True)
class VSRNConfig(EncoderConfig):
    """Settings of VSRN; the defaults are the published ones."""

    embed_dim: int = other_default(EncoderConfig, "embed_dim", 2048)
    graph_layers: int = setting(4, help="Layers of region relationship reasoning.", minimum=1, maximum=64)
    normalize_regions: bool = setting(
        True, help="L2-normalise the regions before the reasoning; the authors' code does on COCO, not on Flickr30K."
    )
    image_batch_norm: bool = setting(
        False, help="Apply batch normalisation to the image vector, as the authors' code does on Flickr30K."
    )
    caption_weight: float = setting(
        0.0,
        help="Weight of the loss of generating each caption from its image in training, averaged over the batch; 0: no "
        "generation. The paper uses 1.",
        minimum=0,
    )
    caption_hidden_dim: int = setting(512, help="Width of the networks that generate captions.", minimum=1)
    caption_dropout: float = setting(
        0.2, help="Dropout on the inputs of the networks that generate captions.", minimum=0, below=1
    )


@register
class VSRN(FragmentModel):
    """Score images, encoded by a graph and a GRU over their regions, with captions, encoded by a GRU, by cosine."""

    name = "vsrn"
    summary = "VSRN: region relationship reasoning, one vector per item (Li et al., ICCV 2019)."
    Config = VSRNConfig

    def __init__(self, config: VSRNConfig) -> None:
        super().__init__()
        self.config = config
        self.image_encoder = make_image_encoder(config, no_imgnorm=not config.normalize_regions)
        self.graph = nn.Sequential(*(RegionReasoning(config.embed_dim) for _ in range(config.graph_layers)))
        self.reader = RegionReader(config.embed_dim)
        self.image_norm = RowNorm(config.embed_dim) if config.image_batch_norm else None
        self.text_encoder = make_text_encoder(config, bidirectional=False, no_txtnorm=True)
        self.decoder = None
        if config.caption_weight:
            self.decoder = CaptionDecoder(
                config.embed_dim,
                config.vocab_size,
                hidden_dim=config.caption_hidden_dim,
                word_dim=config.word_dim,
                dropout=config.caption_dropout,
            )
        self._auxiliary: Tensor | None = None

    def encode_images(self, features: Tensor | Fragments) -> Tensor:
        """Encode (n, k, f), or Fragments of rows (N, f), as (n, d); an image without regions becomes zero."""
        return self.image_fragments(features)[0]

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """Encode padded token ids (n, L) int64 and lengths (n,) as (n, d); a caption without words becomes zero."""
        return self._caption(self.text_encoder.states(token_ids, lengths))

    def encode_fragments(
        self, features: Tensor | Fragments, token_ids: Tensor, lengths: Tensor, micro_batch: int | None = None
    ) -> Encoded:
        """Encode both sides of a batch; fragments are the regions after reasoning and all states of the GRU."""
        sides = {"image_fragments": (features,), "caption_fragments": (token_ids, lengths)}
        (images, regions), (captions, words) = micro_batches.encode(self, sides, micro_batch)
        return Encoded(images, captions, regions, words)

    def image_fragments(self, features: Tensor | Fragments) -> tuple[Tensor, Fragments]:
        """Encode images (n, d), and return their regions after reasoning, too."""
        reasoned: Fragments = self.graph(self.image_encoder(features))
        regions = reasoned.with_values(l2norm(reasoned.values))
        return self._image(regions), regions

    def caption_fragments(self, token_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Fragments]:
        """Encode captions (n, d), and return all states of their GRU, too."""
        states = self.text_encoder.states(token_ids, lengths)
        return self._caption(states), states.with_values(l2norm(states.values))

    @property
    def auxiliary_setting(self) -> str | None:
        """Return "caption_weight" if captions are generated."""
        return None if self.decoder is None else "caption_weight"

    def take_auxiliary_loss(self) -> Tensor | None:
        """Return the weighted loss of generating the captions of the last batch, and forget it."""
        loss, self._auxiliary = self._auxiliary, None
        return loss

    def forward(
        self, features: Tensor | Fragments, token_ids: Tensor, lengths: Tensor, micro_batch: int | None = None
    ) -> Tensor:
        """Score all images with all captions, as `MatchingModel.forward`; in training also generate the captions."""
        if self.decoder is None or not self.training:
            return super().forward(features, token_ids, lengths, micro_batch)
        encoded = self.encode_fragments(features, token_ids, lengths, micro_batch)
        losses = self.decoder(encoded.regions, token_ids, lengths)
        self._auxiliary = self.config.caption_weight * losses.sum() / max(len(losses), 1)
        scores: Tensor = self.score(encoded.images, encoded.captions)
        return scores

    @property
    def scores_within_one(self) -> bool:
        """Return whether the embeddings are normalised."""
        return not (self.config.no_imgnorm or self.config.no_txtnorm)

    def score(self, images: Tensor, captions: Tensor) -> Tensor:
        """Score images (n, d) and captions (m, d): (n, m) float32, images are rows."""
        return inner_products(images, captions)

    def _image(self, regions: Fragments) -> Tensor:
        image: Tensor = self.reader(regions)
        if self.image_norm is not None:
            image = self.image_norm(image).masked_fill((regions.lengths == 0)[:, None], 0.0)
        return image if self.config.no_imgnorm else l2norm(image)

    def _caption(self, states: Fragments) -> Tensor:
        caption = final_states(states)
        return caption if self.config.no_txtnorm else l2norm(caption)
