"""The similarity of SGRAF from the alignments of a pair (Diao et al., AAAI 2021).

Inside: `RegionSelfAttention`, `WordSelfAttention`, `SimilarityGraphReasoning`, `SimilarityAttentionFiltration`, and
`SimilarityReasoning`, which scores pairs with the others. Linear layers start Xavier-uniform with zero bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.image_encoder import linear_layer
from itm_fast.nn.no_rows import connected
from itm_fast.nn.normalization import l2norm
from itm_fast.nn.pooling import mean_pool
from itm_fast.nn.regulators import CrossAttentionAlignments
from itm_fast.nn.residual_image_encoder import RowNorm
from itm_fast.nn.similarity import wide_linear

__all__ = [
    "RegionSelfAttention",
    "SimilarityAttentionFiltration",
    "SimilarityGraphReasoning",
    "SimilarityReasoning",
    "WordSelfAttention",
]


class RegionSelfAttention(nn.Module):
    """Pool the regions of each image by attention to their mean, with batch normalisation.

    Each region position has its own statistics, so every image must have `n_regions` regions.

    Args:
        embed_dim: width d of the embeddings.
        n_regions: regions of each image.
        dropout: in training, on both hidden layers.
    """

    def __init__(self, embed_dim: int, n_regions: int, *, dropout: float = 0.4) -> None:
        super().__init__()
        self.n_regions = n_regions
        self.local = nn.Sequential(
            linear_layer(embed_dim, embed_dim), nn.BatchNorm1d(n_regions), nn.Tanh(), nn.Dropout(dropout)
        )
        self.mean = nn.Sequential(
            linear_layer(embed_dim, embed_dim), RowNorm(embed_dim), nn.Tanh(), nn.Dropout(dropout)
        )
        self.common = linear_layer(embed_dim, 1)

    def forward(self, regions: Fragments) -> Tensor:
        """Regions (N, d) of n images to (n, d), l2-normalised, float32 (float64 for float64)."""
        rows, dim = regions.values.shape
        if rows != len(regions) * self.n_regions or regions.max_length > self.n_regions:
            raise ValueError(
                f"images: expected {self.n_regions} regions in each, got {rows} in {len(regions)} images, at most "
                f"{regions.max_length} in one"
            )
        padded = regions.values.reshape(len(regions), self.n_regions, dim)
        if len(regions) == 0:
            return padded.sum(dim=1, dtype=_wide(padded))
        common = self.local(padded) * self.mean(padded.mean(dim=1))[:, None]
        weights = torch.softmax(self.common(common).squeeze(2), dim=1, dtype=_wide(padded))
        return _weighted_sum(weights, padded)


class WordSelfAttention(nn.Module):
    """Pool the words of each caption by attention to their mean.

    Args:
        embed_dim: width d of the embeddings.
        dropout: in training, on both hidden layers.
    """

    def __init__(self, embed_dim: int, *, dropout: float = 0.4) -> None:
        super().__init__()
        self.local = nn.Sequential(linear_layer(embed_dim, embed_dim), nn.Tanh(), nn.Dropout(dropout))
        self.mean = nn.Sequential(linear_layer(embed_dim, embed_dim), nn.Tanh(), nn.Dropout(dropout))
        self.common = linear_layer(embed_dim, 1)

    def forward(self, words: Fragments) -> Tensor:
        """Words (N, d) of n captions to (n, d), l2-normalised, float32 (float64 for float64); zero for an empty one."""
        sets = words.set_index()
        means = self.mean(mean_pool(words).to(words.dtype))
        logits = self.common(self.local(words.values) * means[sets]).squeeze(1)
        padded, _ = words.with_values(logits[:, None]).to_padded(-torch.inf)
        padded = padded.masked_fill((words.lengths == 0)[:, None, None], 0.0).squeeze(2)
        vectors, _ = words.to_padded()
        return _weighted_sum(torch.softmax(padded, dim=1, dtype=_wide(vectors)), vectors)


class SimilarityGraphReasoning(nn.Module):
    """SGR: the alignments are nodes of a complete graph and exchange messages; the first node is the result.

    Args:
        alignment_dim: width m of the alignments.
        steps: rounds of messages.
    """

    def __init__(self, alignment_dim: int = 256, steps: int = 3) -> None:
        super().__init__()
        self.query = nn.ModuleList(linear_layer(alignment_dim, alignment_dim) for _ in range(steps))
        self.key = nn.ModuleList(linear_layer(alignment_dim, alignment_dim) for _ in range(steps))
        self.graph = nn.ModuleList(linear_layer(alignment_dim, alignment_dim) for _ in range(steps))

    def forward(self, alignments: Tensor) -> Tensor:
        """Alignments (B, nodes, m), the global one first, to (B, m)."""
        for step in range(len(self.query)):
            _, alignments = self._round(step, alignments)
        return alignments[:, 0]

    def shares(self, alignments: Tensor) -> list[Tensor]:
        """Return for each round the share of each node in the message to the first one, (B, nodes)."""
        shares = []
        for step in range(len(self.query)):
            edges, alignments = self._round(step, alignments)
            shares.append(edges[:, 0])
        return shares

    def _round(self, step: int, alignments: Tensor) -> tuple[Tensor, Tensor]:
        """Run one round: return the edges (B, nodes, nodes) and the new alignments."""
        query, key, graph = self.query[step], self.key[step], self.graph[step]
        logits = torch.bmm(query(alignments), key(alignments).transpose(1, 2))
        edges = torch.softmax(logits, dim=2, dtype=_wide(logits))
        return edges, torch.relu(graph(torch.bmm(edges.to(alignments.dtype), alignments)))


class SimilarityAttentionFiltration(nn.Module):
    """SAF: sum the alignments with gates; batch normalisation runs over all gates of a call.

    In training, a call must hold one caption with all images of the batch, as in the official code.
    """

    def __init__(self, alignment_dim: int = 256) -> None:
        super().__init__()
        self.gate = linear_layer(alignment_dim, 1)
        self.norm = nn.BatchNorm1d(1)

    def forward(self, alignments: Tensor) -> Tensor:
        """Alignments (B, nodes, m) to (B, m), l2-normalised."""
        return l2norm(torch.bmm(self._gates(alignments).to(alignments.dtype), alignments).squeeze(1))

    def shares(self, alignments: Tensor) -> list[Tensor]:
        """Return the share of each alignment in the sum, (B, nodes). Shares sum to one."""
        return [self._gates(alignments).squeeze(1)]

    def _gates(self, alignments: Tensor) -> Tensor:
        logits = self.norm(self.gate(alignments).transpose(1, 2))
        gates = torch.sigmoid(logits.to(_wide(logits)))  # (B, 1, nodes)
        return gates / (gates.sum(dim=2, keepdim=True) + 1e-8)


_Head = SimilarityGraphReasoning | SimilarityAttentionFiltration


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype for sums and denominators."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _weighted_sum(weights: Tensor, vectors: Tensor) -> Tensor:
    """Sum vectors (n, k, d) with weights (n, k) in at least float32, and l2-normalise: (n, d)."""
    return l2norm((weights[:, :, None].to(vectors.dtype) * vectors).sum(dim=1, dtype=_wide(vectors)))


class SimilarityReasoning(nn.Module):
    """Score pairs as SGRAF does: from the alignments of the global vectors and of each word.

    Args:
        embed_dim: width d of the embeddings.
        alignment_dim: width m of the alignments.
        graph_steps: rounds of messages of SGR; 0: without SGR.
        filtration: with SAF. With both, the score is the mean of theirs.
        correspondence_steps, temperature, negative_slope, residual_correspondence: as in `CrossAttentionAlignments`.
    """

    def __init__(
        self,
        embed_dim: int,
        alignment_dim: int = 256,
        *,
        graph_steps: int = 3,
        filtration: bool = False,
        correspondence_steps: int = 0,
        temperature: float = 9.0,
        negative_slope: float = 0.1,
        residual_correspondence: bool = True,
    ) -> None:
        super().__init__()
        if graph_steps < 0:
            raise ValueError(f"graph_steps: expected at least 0, got {graph_steps}")
        if graph_steps == 0 and not filtration:
            raise ValueError(
                "graph_steps: expected at least 1 without filtration, got 0: nothing would score the pairs"
            )
        self.global_alignment = linear_layer(embed_dim, alignment_dim)
        self.local_alignments = CrossAttentionAlignments(
            embed_dim,
            alignment_dim,
            steps=correspondence_steps,
            temperature=temperature,
            negative_slope=negative_slope,
            residual_correspondence=residual_correspondence,
        )
        self.heads = nn.ModuleDict()
        if graph_steps:
            self.heads["sgr"] = SimilarityGraphReasoning(alignment_dim, graph_steps)
        if filtration:
            self.heads["saf"] = SimilarityAttentionFiltration(alignment_dim)
        self.evaluations = nn.ModuleDict({name: linear_layer(alignment_dim, 1) for name in self.heads})

    @property
    def coupling(self) -> str:
        """Return "caption" in training with SAF, whose batch normalisation sees one caption with all images."""
        return "caption" if self.training and "saf" in self.heads else "pair"

    def forward(self, images: tuple[Fragments, Tensor], captions: tuple[Fragments, Tensor]) -> Tensor:
        """Score regions and words, each with the global vectors (n, d) of their sets: (n_images, n_captions).

        Images are rows. Scores are float32, in (0, 1); 0 for an empty caption.
        """
        scores = [self._score(*parts) for parts in self._alignments(images, captions)]
        if not scores:
            wide = torch.promote_types(images[1].dtype, torch.float32)
            return connected(images[1].new_zeros(len(images[1]), 0, dtype=wide), self.parameters())
        return torch.stack(scores, dim=1)

    def shares(self, images: tuple[Fragments, Tensor], captions: tuple[Fragments, Tensor]) -> dict[str, list[Tensor]]:
        """Return the weights of "sgr" and "saf" at each step for one image and one caption.

        Weights (1 + n_words,): of the global alignment, then of each word. Arguments as in `forward`.
        """
        ((whole, parts),) = self._alignments(images, captions)
        nodes = torch.cat([whole[:, None], parts], dim=1)
        return {name: [weights[0] for weights in cast(_Head, head).shares(nodes)] for name, head in self.heads.items()}

    def _alignments(
        self, images: tuple[Fragments, Tensor], captions: tuple[Fragments, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each caption its global alignments (n_images, m) and those of its words (n_images, n_words, m)."""
        (regions, image_vectors), (words, caption_vectors) = images, captions
        # Vectors that are nearly parallel leave small differences: they are taken before anything is rounded.
        differences = (image_vectors[:, None] - caption_vectors[None]).square()
        whole = l2norm(self.global_alignment(differences.to(words.dtype)))
        parts = self.local_alignments(words, regions).to(whole.dtype).split(words.lengths.tolist(), dim=1)
        return zip(whole.unbind(1), parts, strict=True)

    def _score(self, global_alignment: Tensor, alignments: Tensor) -> Tensor:
        """Return the scores (n_images,) of one caption."""
        if alignments.shape[1] == 0:
            return alignments.new_zeros(alignments.shape[0], dtype=torch.promote_types(alignments.dtype, torch.float32))
        nodes = torch.cat([global_alignment[:, None], alignments], dim=1)
        logits = [
            wide_linear(cast(nn.Linear, self.evaluations[name]), head(nodes)).squeeze(1)
            for name, head in self.heads.items()
        ]
        scores = [torch.sigmoid(part) for part in logits]
        return scores[0] if len(scores) == 1 else (scores[0] + scores[1]) / 2
