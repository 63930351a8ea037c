"""Text size augmentation: captions that lose and change words in training.

Inside: `TextAugmentation`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .vocabulary import Vocabulary

# Of the words that change, the shares that become `<mask>` and that become another word; the rest are deleted.
_MASKED, _REPLACED = 0.5, 0.1


class TextAugmentation:
    """Changes each word of a caption with a probability: half to `<mask>`, a tenth to a random word, the rest deleted.

    `<start>` and `<end>` stay. The random words are those of the vocabulary that have a meaning: not `<pad>`,
    `<start>`, `<end>`, `<unk>` and `<mask>`. A caption that would lose all of its words stays as it was.
    Source: Chen et al., "Learning the Best Pooling Strategy for Visual Semantic Embedding" (CVPR 2021), whose code has
    the probability 0.2.

    Args:
        vocabulary: must have `<mask>`; `Vocabulary.with_mask` adds it.
        probability: of each word to change, above 0 and at most 1.

    Raises:
        ValueError: the vocabulary has no `<mask>` or no word, or the probability is out of bounds.
    """

    def __init__(self, vocabulary: Vocabulary, probability: float = 0.2) -> None:
        if not 0 < probability <= 1:
            raise ValueError(f"probability: expected a number above 0 and at most 1, got {probability}")
        if vocabulary.mask is None:
            raise ValueError("vocabulary: text augmentation needs the word <mask>, which it does not have")
        special = {vocabulary.pad, vocabulary.start, vocabulary.end, vocabulary.unk, vocabulary.mask}
        words = [index for index in range(len(vocabulary)) if index not in special]
        if not words:
            raise ValueError("vocabulary: text augmentation needs a word to draw, found none")
        self.probability = probability
        self._words, self._pad, self._mask = torch.tensor(words), vocabulary.pad, vocabulary.mask

    def __call__(
        self, token_ids: Tensor, lengths: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Other ids (n, L') int64, padded with `<pad>`, and other lengths (n,) int64. The arguments stay as they are.

        Args:
            token_ids: (n, L) int64 on the CPU, each row `<start>`, words, `<end>`, padding.
            lengths: (n,) int64, `<start>` and `<end>` counted.
            generator: draws the changes; None: torch's own generator, which a run's saved state holds.
        """
        columns = torch.arange(token_ids.shape[1])
        inside = columns < lengths[:, None]
        is_word = inside & (columns > 0) & (columns < lengths[:, None] - 1)
        # Uniform in [0, 1) among the words that change, at least 1 for those that stay.
        draw = torch.rand(token_ids.shape, generator=generator) / self.probability
        random_words = self._words[torch.randint(len(self._words), token_ids.shape, generator=generator)]
        deleted = is_word & (draw >= _MASKED + _REPLACED) & (draw < 1)
        bare = deleted.sum(1) == is_word.sum(1)
        changed = torch.where(is_word & (draw < _MASKED), self._mask, token_ids)
        changed = torch.where(is_word & (draw >= _MASKED) & (draw < _MASKED + _REPLACED), random_words, changed)
        kept = inside & ~(deleted & ~bare[:, None])
        new_lengths = kept.sum(1)
        width = int(new_lengths.max()) if len(lengths) else 0
        result = torch.full((len(lengths), width), self._pad, dtype=token_ids.dtype)
        result[torch.arange(width) < new_lengths[:, None]] = changed[kept]
        return result, new_lengths
