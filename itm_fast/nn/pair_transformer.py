"""`PairTransformer`: score an image and a caption by one BERT over words, object tags and regions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.bert_text_encoder import make_bert, padded_pieces
from itm_fast.nn.no_rows import connected
from itm_fast.nn.padded_pairs import at_least_a_row
from itm_fast.nn.similarity import wide_linear
from itm_fast.reference import validation

__all__ = ["PairScores", "PairTransformer"]

# The standard deviation of BERT's first weights.
INITIAL_DEVIATION = 0.02


class PairTransformer(nn.Module):
    """A BERT that reads a caption, object tags and regions together, with a head for match and no match.

    `embed_captions` and `embed_tags` compute what does not depend on the pair. `pairs` scores pairs, for use in
    `gradient_sparse_scores`. BERT comes from the package transformers; the weights start random.

    In training, the dropout of a word's embedding is drawn once for all pairs of its caption. The dropout inside the
    layers is drawn for each pair.

    Args:
        vocab_size: number of pieces in the vocabulary.
        dim: width d of BERT's states. layers, heads: of its transformer. hidden_dim: width of its perceptrons.
        max_length: maximum tokens per caption, including `[CLS]` and `[SEP]`.
        max_text_length: tokens of a caption and its tags together; further tags are left out.
        dropout: of BERT's states and attention weights in training.
        probability: score by the probability of a match, not by its log-odds.

    Raises:
        ValueError: the package transformers is not installed, or `dim` is no multiple of `heads`.

    Source: Li et al., Oscar: Object-Semantics Aligned Pre-training for Vision-Language Tasks, ECCV 2020, in the form of
    the authors' code for retrieval.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        dim: int = 768,
        layers: int = 12,
        heads: int = 12,
        hidden_dim: int = 3072,
        max_length: int = 512,
        max_text_length: int = 70,
        dropout: float = 0.1,
        probability: bool = False,
    ) -> None:
        super().__init__()
        self.vocab_size, self.max_length, self.max_text_length = vocab_size, max_length, max_text_length
        self.probability = probability
        self.bert = make_bert(vocab_size, dim, layers, heads, hidden_dim, max_length, dropout)
        self.pooler = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(dim, 2)
        for layer in (self.pooler, self.classifier):
            nn.init.normal_(layer.weight, std=INITIAL_DEVIATION)
            nn.init.zeros_(layer.bias)

    def embed_captions(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Embed pieces with their positions: rows (sum of lengths, d).

        Args:
            token_ids: (n, L) int64, padded anyhow.
            lengths: (n,) int64.

        Raises:
            ValueError: a type, shape or value does not fit, or a caption is longer than `max_length`.
        """
        ids, inside, offsets = padded_pieces(token_ids, lengths, self.vocab_size, self.max_length)
        if ids.shape[1]:
            rows = self.bert.embeddings(input_ids=ids)[inside]
        else:
            empty = self.pooler.weight.new_zeros(0, self.pooler.in_features)
            rows = connected(empty, self.bert.embeddings.parameters())
        return Fragments(rows, offsets, check=False, max_length=ids.shape[1])

    def embed_tags(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Embed the pieces of tags without positions, which follow from the caption: rows (sum of lengths, d).

        Args:
            token_ids: (n, T) int64, padded anyhow: pieces and `[SEP]`.
            lengths: (n,) int64; 0: an image without tags.

        Raises:
            ValueError: a type, shape or value does not fit.
        """
        ids, inside, offsets = padded_pieces(token_ids, lengths, self.vocab_size, max(token_ids.shape[1:], default=0))
        embeddings = self.bert.embeddings
        rows = embeddings.word_embeddings(ids[inside]) + embeddings.token_type_embeddings.weight[1]
        return Fragments(rows, offsets, check=False, max_length=ids.shape[1])

    def pairs(self, *, tags: bool) -> PairScores:
        """Return the module that scores pairs with these weights. `tags`: images are regions and tags."""
        return PairScores(self, tags=tags)


class PairScores(nn.Module):
    """The layers of a `PairTransformer` that depend on the pair, for `gradient_sparse_scores`.

    It shares the weights. Those of the words are left out: the gradients of scored pairs would otherwise contain zeros
    for the whole vocabulary.

    Args:
        of: holds the weights.
        tags: images are regions and tags.
    """

    def __init__(self, of: PairTransformer, *, tags: bool) -> None:
        super().__init__()
        self.encoder, self.pooler, self.dropout, self.classifier = of.bert.encoder, of.pooler, of.dropout, of.classifier
        self.max_text_length, self.probability = of.max_text_length, of.probability
        if tags:
            embeddings: Any = of.bert.embeddings
            self.positions, self.norm = embeddings.position_embeddings, embeddings.LayerNorm

    def forward(self, images: Fragments | tuple[Fragments, Fragments], captions: Fragments) -> Tensor:
        """Score all pairs of some images and some captions: (n_images, n_captions), images are rows.

        Args:
            images: regions of rows (d); with tags, regions and what `embed_tags` returns.
            captions: what `embed_captions` returns. A caption without words is read as one row of zeros.
        """
        regions, tags = images if isinstance(images, tuple) else (images, None)
        for name, sets in (("images", regions), ("captions", captions)):
            validation.check_fragments(name, sets)
        shape = len(regions), len(captions)
        words, n_words = at_least_a_row(captions)
        rows, n_rows = regions.to_padded()
        # The state of the first row is what the head reads, so it always takes part.
        parts = [
            (words[None], _inside(n_words.clamp(min=1), words)[None]),
            (rows[:, None], _inside(n_rows, rows)[:, None]),
        ]
        if tags is not None and tags.max_length:
            parts.insert(1, self._placed(tags, n_words))
        hidden = torch.cat([part.expand(*shape, -1, -1) for part, _ in parts], dim=2).flatten(0, 1)
        seen = torch.cat([there.expand(*shape, -1) for _, there in parts], dim=2).flatten(0, 1)
        mask = torch.zeros_like(seen, dtype=hidden.dtype).masked_fill_(~seen, torch.finfo(hidden.dtype).min)
        states = self.encoder(hidden, attention_mask=mask[:, None, None]).last_hidden_state
        logits = wide_linear(self.classifier, self.dropout(torch.tanh(self.pooler(states[:, 0]))))
        odds = (logits[:, 1] - logits[:, 0]).view(shape)
        return odds.sigmoid() if self.probability else odds

    def _placed(self, tags: Fragments, n_words: Tensor) -> tuple[Tensor, Tensor]:
        """Return tags (n, m, t, d) behind the words of each caption, and where they are, bool (n, m, t)."""
        rows, n_tags = tags.to_padded()
        places = torch.arange(rows.shape[1], device=rows.device)
        room = (self.max_text_length - n_words).clamp(min=0)
        kept = torch.minimum(n_tags[:, None], room[None])[..., None]  # (n, m, 1)
        # A list that is cut short ends with its [SEP], too.
        chosen = torch.where(places == kept - 1, n_tags[:, None, None] - 1, places)
        images = torch.arange(len(rows), device=rows.device)[:, None, None]
        last = self.positions.num_embeddings - 1
        positions = self.positions((n_words[:, None] + places).clamp(max=last))  # (m, t, d)
        return self.dropout(self.norm(rows[images, chosen.clamp(min=0)] + positions)), places < kept


def _inside(lengths: Tensor, padded: Tensor) -> Tensor:
    return torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
