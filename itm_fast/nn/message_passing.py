"""`MessagePassing`: CAMP's similarity, with messages between the regions and the words of each pair."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from itm_fast import reference
from itm_fast.fragments import Fragments
from itm_fast.nn.image_encoder import linear_layer, narrowed
from itm_fast.nn.message_direction import MessageDirection, PaddedSide, Passed, without_bias
from itm_fast.nn.normalization import l2norm
from itm_fast.nn.regulators import RecurrentAggregationRegulator, RecurrentCorrespondenceRegulator
from itm_fast.nn.similarity import wide_linear
from itm_fast.reference import validation

__all__ = ["MessagePassing"]

HEADS = ("sigmoid", "cosine")
FUSIONS = ("concat", "sum")


class MessagePassing(nn.Module):
    """Score pairs by messages between regions and words, for use in `gradient_sparse_scores`.

    `MessageDirection` passes messages from words to regions, giving a vector v of the picture, and from regions to
    words, giving t of the caption. The score is `sigmoid(w^T relu(W [v; t] + b) + c)`, of `v + t` with the fusion
    "sum", or the cosine of v and t.

    Args:
        dim: width d of regions and words.
        message_attention: messages attend to each other before the fusion, queries and keys have separate weights, and
            v and t are l2-normalised (the authors' later code). Otherwise the keys of a side are its queries, too.
        head: "sigmoid" with fusion, or "cosine" without.
        fusion: "concat" or "sum".
        heads: heads of the pooling.
        correspondence_steps, aggregation_steps: steps of RCR and RAR in each direction.
        alignment_dim: width of RCR's alignments.
        dropout: in RAR, in training.
        residual_correspondence, residual_aggregation: as in the regulators.

    Raises:
        TypeError, ValueError: `head` or `fusion` is unknown, a size is below 1, or a setting of the regulators is out
            of bounds.

    Source: Wang et al., "CAMP: Cross-Modal Adaptive Message Passing for Text-Image Retrieval" (ICCV 2019), in the forms
    of its official code, with one gate for each row.
    """

    def __init__(
        self,
        dim: int,
        *,
        message_attention: bool = True,
        head: str = "sigmoid",
        fusion: str = "concat",
        heads: int = 4,
        correspondence_steps: int = 0,
        aggregation_steps: int = 0,
        alignment_dim: int = 256,
        dropout: float = 0.4,
        residual_correspondence: bool = True,
        residual_aggregation: bool = False,
    ) -> None:
        super().__init__()
        validation.check_sizes(dim=dim, heads=heads, alignment_dim=alignment_dim)
        validation.check_option("head", head, HEADS)
        validation.check_option("fusion", fusion, FUSIONS)
        self.head, self.fusion, self.message_attention = head, fusion, message_attention

        def direction() -> MessageDirection:
            return MessageDirection(
                dim,
                message_attention=message_attention,
                fusion=fusion if head == "sigmoid" else "none",
                heads=heads,
                correspondence=RecurrentCorrespondenceRegulator(
                    dim, alignment_dim, correspondence_steps, residual=residual_correspondence
                ),
                alignment_dim=alignment_dim,
                aggregation=RecurrentAggregationRegulator(
                    dim, aggregation_steps, residual=residual_aggregation, dropout=dropout
                )
                if aggregation_steps
                else None,
            )

        self.image_key, self.text_key = without_bias(dim, dim), without_bias(dim, dim)
        if message_attention:
            self.image_query, self.text_query = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.to_regions, self.to_words = direction(), direction()
        if head == "sigmoid":
            inputs = 2 * dim if fusion == "concat" else dim
            self.evaluation = nn.Sequential(linear_layer(inputs, dim), nn.ReLU(), linear_layer(dim, 1))

    def forward(self, images: Fragments, captions: Fragments) -> Tensor:
        """Score regions and words: (n_images, n_captions) float32, images are rows; 0 for an empty set."""
        validation.check_fragments("images", images)
        validation.check_fragments("captions", captions)
        regions, words = PaddedSide.of(images, 1), PaddedSide.of(captions, 0)
        to_regions, to_words = self._passed(regions, words)
        scores = self._score(to_regions.vector, to_words.vector)
        return scores.masked_fill((regions.lengths == 0) | (words.lengths == 0), 0.0)

    def steps(self, words: Tensor, regions: Tensor) -> dict[str, reference.RegulationSteps]:
        """Return the intermediate results of one pair: words (n, d) and regions (k, d). Dropout is that of the mode.

        Returns:
            "t2i", where words attend to regions, and "i2t": the attention (n, k) or (k, n) and the factors of the inner
            products (n,) or (k,) of each attention, and the weights (n,) or (k,) of each pooling.
        """
        sides = (
            PaddedSide.of(Fragments.from_padded(regions[None]), 1),
            PaddedSide.of(Fragments.from_padded(words[None]), 0),
        )
        to_regions, to_words = self._passed(*sides)
        return {
            "t2i": to_words.of_first(self.to_words.shares(sides[1], to_words.fused), len(words), len(regions)),
            "i2t": to_regions.of_first(self.to_regions.shares(sides[0], to_regions.fused), len(regions), len(words)),
        }

    def weights(self, words: Tensor, regions: Tensor) -> Tensor:
        """Return the last attention of the words (n, d) of one pair to its regions (k, d): (n, k)."""
        return self.steps(words, regions)["t2i"].attention[-1]

    def _passed(self, regions: PaddedSide, words: PaddedSide) -> tuple[Passed, Passed]:
        region_keys, word_keys = self.image_key(regions.rows), self.text_key(words.rows)
        region_queries, word_queries = region_keys, word_keys
        if self.message_attention:
            region_queries, word_queries = self.image_query(regions.rows), self.text_query(words.rows)
        return (
            self.to_regions(regions, region_queries, words, word_keys),
            self.to_words(words, word_queries, regions, region_keys),
        )

    def _score(self, picture: Tensor, caption: Tensor) -> Tensor:
        if self.head == "cosine":
            return (l2norm(picture) * l2norm(caption)).sum(dim=2)
        if self.message_attention:
            picture, caption = l2norm(picture), l2norm(caption)
        both = picture + caption if self.fusion == "sum" else torch.cat([picture, caption], dim=2)
        inner, activation, last = self.evaluation
        return torch.sigmoid(
            wide_linear(cast(nn.Linear, last), activation(inner(narrowed(both, cast(Tensor, inner.weight))))).squeeze(2)
        )
