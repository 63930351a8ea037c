"""How a model yields the regions and words that enter its similarity, for methods that look at each of them.

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
    """n images and n captions after the encoders.

    Attributes:
        images, captions: the embeddings, as `model.score` takes them.
        regions, words: Fragments of n sets each, l2-normalised rows (N, d): what enters the similarity.
    """

    images: Any
    captions: Any
    regions: Fragments
    words: Fragments


class FragmentModel(MatchingModel):
    """A model whose embeddings are the fragments that it compares: both encoders give `Fragments` of one width.

    A model of one vector per item that has fragments on the way to it overrides `encode_fragments`, as VSRN does, and
    `fragment_dim` where their width is not `config.embed_dim`; one whose settings decide overrides `yields_fragments`.
    """

    @property
    def yields_fragments(self) -> bool:
        """Whether there are fragments with the settings of this model."""
        return True

    @property
    def fragment_dim(self) -> int:
        """Width d of the regions and words."""
        return int(self.encoder_config.embed_dim)

    @property
    def normalized_embeddings(self) -> tuple[bool, bool]:
        """Whether the embeddings of images and those of captions are l2-normalised."""
        return not self.config.no_imgnorm, not self.config.no_txtnorm

    def encode_fragments(
        self, features: Tensor | Fragments, token_ids: Tensor, lengths: Tensor, micro_batch: int | None = None
    ) -> Encoded:
        """Both sides of a batch, with what enters the similarity; the arguments are those of `forward`."""
        images, captions = self.encode(features, token_ids, lengths, micro_batch)
        # Normalised twice would be the same but for rounding.
        of_images, of_captions = self.normalized_embeddings
        regions = images if of_images else _normalized(images)
        words = captions if of_captions else _normalized(captions)
        return Encoded(images, captions, regions, words)


def _normalized(fragments: Fragments) -> Fragments:
    return fragments.with_values(l2norm(fragments.values))
