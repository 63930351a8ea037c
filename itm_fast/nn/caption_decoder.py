"""`CaptionDecoder`: generates captions from regions, for VSRN's second loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.no_rows import connected
from itm_fast.nn.packing import Packing, padded_rows
from itm_fast.nn.pooling import final_states
from itm_fast.ops.library import outside_graphs
from itm_fast.reference import validation

__all__ = ["CaptionDecoder"]


class CaptionDecoder(nn.Module):
    """Predict each word of a caption from the regions of its image and the words before it.

    A GRU reads the regions, `e_k = GRU(W v_k)`. A second GRU starts from its last state and reads the word w_t and the
    regions that it attends to: `a = softmax_k(u tanh(A [e_k; h_t] + b))`, `h_{t+1} = GRU([w_t; sum_k a_k e_k], h_t)`.
    Then `p(w_{t+1}) = softmax(O h_{t+1} + o)`.

    Args:
        dim: width D of the regions.
        vocab_size: number of words.
        hidden_dim: width of both GRUs and of the attention.
        word_dim: width of the word vectors.
        dropout: in training, on the inputs of both GRUs.

    Raises:
        ValueError: a size is not a whole number of at least 1.

    Source: Li et al., "Visual Semantic Reasoning for Image-Text Matching" (ICCV 2019), section 3.4; sizes and layers
    are those of its official code.
    """

    def __init__(
        self, dim: int, vocab_size: int, *, hidden_dim: int = 512, word_dim: int = 300, dropout: float = 0.2
    ) -> None:
        super().__init__()
        validation.check_sizes(dim=dim, vocab_size=vocab_size, hidden_dim=hidden_dim, word_dim=word_dim)
        self.project = nn.Linear(dim, hidden_dim)
        self.reader = nn.GRU(hidden_dim, hidden_dim)
        self.embed = nn.Embedding(vocab_size, word_dim)
        # A of e_k, and A of h_t with b.
        self.of_region = nn.Linear(hidden_dim, hidden_dim, bias=False)
        self.of_state = nn.Linear(hidden_dim, hidden_dim)
        self.relevance = nn.Linear(hidden_dim, 1, bias=False)
        self.writer = nn.GRUCell(word_dim + hidden_dim, hidden_dim)
        self.out = nn.Linear(hidden_dim, vocab_size)
        self.dropout = nn.Dropout(dropout)
        for layer in (self.project, self.of_region, self.of_state, self.relevance, self.out):
            nn.init.xavier_normal_(layer.weight)

    @outside_graphs
    def forward(self, regions: Fragments, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the negative log-likelihood of each caption, the sum over its words after the first.

        Args:
            regions: n sets of rows (N, D).
            token_ids: (n, L) int64, padded; each caption starts with `<start>`.
            lengths: (n,) int64.

        Returns:
            (n,) float32 (float64 for float64). A caption of fewer than two words has 0.
        """
        validation.check_fragments("regions", regions)
        if len(lengths) == 0 or token_ids.shape[1] < 2:
            wide = torch.promote_types(self.out.bias.dtype, torch.float32)
            return connected(self.out.bias.new_zeros(len(lengths), dtype=wide), self.parameters())
        contexts, keys, state = self._read(regions)
        seen = torch.arange(contexts.shape[1], device=regions.device) < regions.lengths.clamp(min=1)[:, None]
        words = self.embed(token_ids[:, :-1])
        states = []
        for step in range(words.shape[1]):
            raw = self.relevance((keys + self.of_state(state)[:, None]).tanh())[..., 0]
            shares = raw.masked_fill(~seen, -torch.inf).softmax(dim=1)
            context = torch.einsum("nk,nkd->nd", shares.to(contexts.dtype), contexts)
            state = self.writer(self.dropout(torch.cat([words[:, step], context], dim=1)), state)
            states.append(state)
        logits = self.out(torch.stack(states, dim=1))
        losses = F.cross_entropy(
            logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
            token_ids[:, 1:].flatten(),
            reduction="none",
        ).view(len(lengths), -1)
        told = torch.arange(1, token_ids.shape[1], device=losses.device) < lengths.to(losses.device)[:, None]
        return (losses * told).sum(dim=1)

    def _read(self, regions: Fragments) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the first GRU says of each region (n, k, h), A of it, and its last states (n, h).

        Padding is zeros; an image without regions has zeros, too.
        """
        packing = Packing(regions.lengths, regions.device)
        if packing.n_rows == 0:
            none = self.out.weight.new_zeros(len(regions), 1, self.out.in_features)
            none = connected(none, [*self.project.parameters(), *self.reader.parameters(), self.of_region.weight])
            return none, none, none[:, 0]
        read = packing.unpack(self.reader(packing.pack(self.dropout(self.project(regions.values))))[0].data)
        contexts = padded_rows(read, read.values)
        return contexts, padded_rows(read, self.of_region(read.values)), final_states(read).to(contexts.dtype)
