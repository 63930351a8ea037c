"""Access to the regions and words that enter a model's similarity.

Inside: `Encoded`, `FragmentModel`.
"""

from __future__ import annotations

from typing import Any

import attrs
from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.models.base import MatchingModel
from itm_fast.nn import l2norm

__all__ = ["Encoded", "FragmentModel"]


@attrs.frozen(eq=False)
class Encoded:
    """n encoded images and n encoded captions.

    Attributes:
        images, captions: the embeddings that `model.score` takes.
        regions, words: the fragments that enter the similarity, n sets each, l2-normalised rows (N, d).
    """

    images: Any
    captions: Any
    regions: Fragments
    words: Fragments


class FragmentModel(MatchingModel):
    """A model that compares fragments: both encoders return `Fragments` of the same width.

    A model with one vector per item but intermediate fragments overrides `encode_fragments`, as VSRN does, and
    `fragment_dim` if their width is not `config.embed_dim`. Override `yields_fragments` if it depends on the settings.
    """

    @property
    def yields_fragments(self) -> bool:
        """Return whether the model has fragments with its settings."""
        return True

    @property
    def fragment_dim(self) -> int:
        """Return the width d of the regions and words."""
        return int(self.encoder_config.embed_dim)

    @property
    def normalized_embeddings(self) -> tuple[bool, bool]:
        """Return whether the embeddings of images, and those of captions, are l2-normalised."""
        return not self.config.no_imgnorm, not self.config.no_txtnorm

    def encode_fragments(
        self, features: Tensor | Fragments, token_ids: Tensor, lengths: Tensor, micro_batch: int | None = None
    ) -> Encoded:
        """Encode both sides of a batch and return the fragments, too. Arguments as in `forward`."""
        images, captions = self.encode(features, token_ids, lengths, micro_batch)
        # Normalising twice would only add rounding.
        of_images, of_captions = self.normalized_embeddings
        regions = images if of_images else _normalized(images)
        words = captions if of_captions else _normalized(captions)
        return Encoded(images, captions, regions, words)


def _normalized(fragments: Fragments) -> Fragments:
    return fragments.with_values(l2norm(fragments.values))
