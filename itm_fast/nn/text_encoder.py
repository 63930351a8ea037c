"""Token ids to word embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from itm_fast.fragments import Fragments, has_values
from itm_fast.nn.no_rows import connected
from itm_fast.nn.normalization import l2norm
from itm_fast.nn.packing import Packing
from itm_fast.ops.library import outside_graphs
from itm_fast.reference import validation

__all__ = ["TextEncoder"]


class TextEncoder(nn.Module):
    """Encode words by word vectors, a GRU with averaged directions, and l2 normalisation, as SCAN does.

    Args:
        vocab_size: number of words.
        embed_dim: width d of the embeddings, and of the GRU's state per direction.
        word_dim: width of the word vectors, which start uniform in [-0.1, 0.1].
        num_layers: layers of the GRU.
        word_dropout: probability of dropping each value of a word vector in training (0.4 in SGRAF and RCAR).
        bidirectional: read the words in both directions (SCAN), or only forwards (VSE++).
        no_txtnorm: leave the l2 normalisation out.

    Raises:
        ValueError: a size is not a whole number of at least 1.
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        *,
        word_dim: int = 300,
        num_layers: int = 1,
        word_dropout: float = 0.0,
        bidirectional: bool = True,
        no_txtnorm: bool = False,
    ) -> None:
        super().__init__()
        validation.check_sizes(vocab_size=vocab_size, embed_dim=embed_dim, word_dim=word_dim, num_layers=num_layers)
        self.no_txtnorm = no_txtnorm
        self.embed_dim = embed_dim
        self.embed = nn.Embedding(vocab_size, word_dim)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        self.dropout = nn.Dropout(word_dropout)
        self.rnn = nn.GRU(word_dim, embed_dim, num_layers, bidirectional=bidirectional)

    def forward(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """`token_ids` (n, L) int64, padded anyhow, and `lengths` (n,) to Fragments of rows (sum of lengths, d)."""
        states, packing = self._packed_states(token_ids, lengths)
        if self.rnn.bidirectional:
            states = (states[:, : self.embed_dim] + states[:, self.embed_dim :]) / 2
        return packing.unpack(states if self.no_txtnorm else l2norm(states))

    def states(self, token_ids: Tensor, lengths: Tensor) -> Fragments:
        """Return the GRU's state after each word: rows (sum of lengths, d), or (..., 2 d), forward first.

        Arguments as in `forward`; the states are not normalised.
        """
        states, packing = self._packed_states(token_ids, lengths)
        return packing.unpack(states)

    @outside_graphs
    def _packed_states(self, token_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Packing]:
        """Run the GRU on packed words, longest captions first, so that padding costs no work.

        How to pack depends on the values of `lengths`, which graphs of `torch.compile` do not have.
        """
        check_captions(token_ids, lengths, self.embed.num_embeddings)
        packing = Packing(lengths, token_ids.device)
        if packing.n_rows == 0:
            directions = 2 if self.rnn.bidirectional else 1
            empty = self.embed.weight.new_zeros(0, directions * self.embed_dim)
            return connected(empty, self.parameters()), packing
        words = self.dropout(self.embed(token_ids.reshape(-1)[packing.padded_index(token_ids.shape[1])]))
        return self.rnn(PackedSequence(words, packing.batch_sizes))[0].data, packing


def check_captions(token_ids: Tensor, lengths: Tensor, vocab_size: int) -> None:
    """Raise TypeError or ValueError if padded ids (n, L) and lengths (n,) do not fit; values only on the CPU."""
    if token_ids.dim() != 2 or token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"token_ids: expected an integer tensor (n, L), got {token_ids.dtype} of shape {tuple(token_ids.shape)}"
        )
    if not isinstance(lengths, Tensor):
        raise TypeError(f"lengths: expected an integer tensor, got {validation.describe(lengths)}")
    if lengths.shape != token_ids.shape[:1] or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"lengths: expected an integer tensor of shape ({token_ids.shape[0]},), "
            f"got {lengths.dtype} of shape {tuple(lengths.shape)}"
        )
    if token_ids.device.type != "cpu" or lengths.numel() == 0 or not has_values(token_ids):
        return
    if token_ids.numel():
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"token_ids: expected ids from 0 to {vocab_size - 1}, got {low} to {high}")
    low, high = int(lengths.min()), int(lengths.max())
    if low < 0 or high > token_ids.shape[1]:
        raise ValueError(f"lengths: expected values from 0 to {token_ids.shape[1]}, got {low} to {high}")
