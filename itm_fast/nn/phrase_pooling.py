"""`PhrasePooling`: the strongest phrases of a caption, found by convolutions over its words."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.reference import validation

__all__ = ["PhrasePooling"]


class PhrasePooling(nn.Module):
    """Pool the words of each caption: convolutions over phrases of 1, 2 and 3 words, and the maximum over the caption.

    `c_w = max_i relu(W_w [x_i; ...; x_(i+w-1)] + b_w)` over the phrases of w words, then `fc(drop([c_1; c_2; c_3]))`.
    A caption of fewer than w words is one phrase, filled up with zeros. Padding is not part of a phrase.

    Args:
        word_dim: width of the words.
        dim: width d of the result.
        channels: channels of each convolution.
        widths: numbers of words in a phrase.
        dropout: in training, before the last layer.

    Raises:
        ValueError: a size is not a whole number of at least 1, or `widths` is empty.

    Source: Wu et al., "Learning Fragment Self-Attention Embeddings for Image-Text Matching" (ACM MM 2019).
    """

    def __init__(
        self,
        word_dim: int,
        dim: int,
        *,
        channels: int = 512,
        widths: tuple[int, ...] = (1, 2, 3),
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        validation.check_sizes(word_dim=word_dim, dim=dim, channels=channels)
        if not widths:
            raise ValueError("widths: expected at least one number of words, got none")
        for width in widths:
            validation.check_count("widths", width, minimum=1)
        self.widths = widths
        self.convolutions = nn.ModuleList(nn.Conv1d(word_dim, channels, width) for width in widths)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(len(widths) * channels, dim)

    def forward(self, words: Fragments) -> Tensor:
        """Pool words (N, word_dim) of n captions to (n, d), float32 (float64 for float64); zero for an empty one."""
        validation.check_fragments("words", words)
        padded, lengths = words.to_padded()
        pairs = zip(self.widths, self.convolutions, strict=True)
        pooled = [self._strongest(layer, width, padded.transpose(1, 2), lengths) for width, layer in pairs]
        vectors = self.fc(self.dropout(torch.cat(pooled, dim=1)))
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        return vectors.masked_fill((lengths == 0)[:, None], 0.0)

    @staticmethod
    def _strongest(layer: nn.Module, width: int, padded: Tensor, lengths: Tensor) -> Tensor:
        """Return the maximum (n, channels) of a convolution over the phrases of captions (n, word_dim, longest)."""
        phrases = layer(F.pad(padded, (0, max(width - padded.shape[2], 0))))  # (n, channels, phrases)
        last = (lengths - width).clamp(min=0)
        beyond = torch.arange(phrases.shape[2], device=last.device) > last[:, None]
        return torch.relu(phrases.masked_fill(beyond[:, None], -torch.inf).amax(dim=2))
