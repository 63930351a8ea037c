"""Token ids to word embeddings through BERT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.image_encoder import linear_layer
from itm_fast.nn.no_rows import connected
from itm_fast.nn.normalization import l2norm
from itm_fast.nn.text_encoder import check_captions
from itm_fast.reference import validation

__all__ = ["BertTextEncoder", "make_bert", "padded_pieces"]


class BertTextEncoder(nn.Module):
    """Encode captions by BERT, a linear layer and l2 normalisation per token, as VSE-infinity and RVSE++ do.

    BERT (Devlin et al., NAACL 2019) comes from the package transformers. The defaults are the sizes of BERT base. The
    weights start random; `itm_fast.models.bert_folder` reads pretrained ones.

    Args:
        vocab_size: number of pieces in the vocabulary.
        embed_dim: width d of the embeddings; None: BERT's states are the embeddings, without a linear layer.
        bert_dim: width of BERT's states. layers, heads: of its transformer. hidden_dim: width of its perceptrons.
        max_length: maximum tokens per caption, including `[CLS]` and `[SEP]`.
        dropout: of BERT's states and attention weights in training.
        no_txtnorm: leave the l2 normalisation out.

    Raises:
        ValueError: the package transformers, which is optional, is not installed, or `bert_dim` is no multiple of
            `heads`.
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int | None,
        *,
        bert_dim: int = 768,
        layers: int = 12,
        heads: int = 12,
        hidden_dim: int = 3072,
        max_length: int = 512,
        dropout: float = 0.1,
        no_txtnorm: bool = False,
    ) -> None:
        super().__init__()
        self.no_txtnorm = no_txtnorm
        self.vocab_size, self.max_length = vocab_size, max_length
        self.bert = make_bert(vocab_size, bert_dim, layers, heads, hidden_dim, max_length, dropout)
        self.fc = nn.Identity() if embed_dim is None else linear_layer(bert_dim, embed_dim)

    def forward(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """`token_ids` (n, L) int64, padded anyhow, and `lengths` (n,) to Fragments of rows (sum of lengths, d).

        Raises:
            ValueError: a type, shape or value does not fit, or a caption is longer than BERT's `max_length`.
        """
        states = self.states(token_ids, lengths)
        embedded = self.fc(states.values)
        return states.with_values(embedded if self.no_txtnorm else l2norm(embedded))

    def states(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """BERT's states: rows (sum of lengths, `bert_dim`). Arguments and errors as in `forward`."""
        ids, inside, offsets = padded_pieces(token_ids, lengths, self.vocab_size, self.max_length)
        if ids.shape[1] == 0:
            empty = next(self.bert.parameters()).new_zeros(0, self.bert.config.hidden_size)
            return Fragments(connected(empty, self.bert.parameters()), offsets, check=False, max_length=0)
        # A caption without words sees one token, whose state is left.
        seen = inside | (torch.arange(ids.shape[1], device=ids.device) == 0)
        states = self.bert(input_ids=ids, attention_mask=seen.to(torch.int64)).last_hidden_state
        return Fragments(states[inside], offsets, check=False, max_length=ids.shape[1])


def make_bert(
    vocab_size: int, dim: int, layers: int, heads: int, hidden_dim: int, max_length: int, dropout: float
) -> Any:
    """Create the `BertModel` of transformers with random weights, without a pooling layer.

    Raises:
        ValueError: the package transformers is not installed, `dim` is no multiple of `heads`, or a size is
            below 1.
    """
    try:
        from transformers import BertConfig, BertModel
    except ImportError:
        raise ValueError(
            "bert: the package transformers is not installed; install it with pip install 'itm_fast[bert]'"
        ) from None
    validation.check_sizes(vocab_size=vocab_size, bert_dim=dim, layers=layers, heads=heads)
    validation.check_sizes(hidden_dim=hidden_dim, max_length=max_length)
    if dim % heads:
        raise ValueError(f"bert_dim: expected a multiple of the {heads} heads, got {dim}")
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=hidden_dim,
        max_position_embeddings=max_length,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertModel(config, add_pooling_layer=False)


def padded_pieces(
    token_ids: Tensor, lengths: Tensor, vocab_size: int, max_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Check token ids (n, L), padded anyhow, and lengths (n,).

    Returns:
        The ids without needless padding, int64 (n, longest), 0 behind a caption; where captions are, bool (n, longest);
        and the offsets (n + 1,) of the captions end to end.

    Raises:
        ValueError: a type, shape or value does not fit, or a caption is longer than `max_length`.
    """
    check_captions(token_ids, lengths, vocab_size)
    lengths = lengths.to(token_ids.device)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    longest = int(lengths.max()) if len(lengths) else 0
    if longest > max_length:
        raise ValueError(f"token_ids: expected at most {max_length} tokens in a caption, got {longest}")
    inside = torch.arange(longest, device=lengths.device) < lengths[:, None]
    # What stands behind a caption may be no id at all.
    return token_ids[:, :longest].masked_fill(~inside, 0).to(torch.int64), inside, offsets
