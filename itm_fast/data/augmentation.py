"""Size augmentation: captions that lose and change words, and images that lose regions, in training.

Inside: `TextAugmentation`, `RegionAugmentation`, and `BatchAugmentation`, which is both.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from itm_fast.data.dataset import Batch
from itm_fast.data.vocabulary import Vocabulary
from itm_fast.fragments import Fragments

# Of the words that change, the shares that become `<mask>` and that become another word; the rest are deleted.
_MASKED, _REPLACED = 0.5, 0.1


class TextAugmentation:
    """Changes each word of a caption with a probability: half to `<mask>`, a tenth to a random word, the rest deleted.

    `<start>` and `<end>` stay. The random words are those of the vocabulary that have a meaning: not `<pad>`,
    `<start>`, `<end>`, `<unk>` and `<mask>`. A caption that would lose all of its words stays as it was. Of a word that
    is several pieces of a BERT vocabulary all change together, each of them to a random piece of its own.
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
        self._continues: Tensor | None = None
        if vocabulary.continuations:
            self._continues = torch.zeros(len(vocabulary), dtype=torch.bool)
            self._continues[torch.tensor(vocabulary.continuations)] = True

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
        if self._continues is not None and token_ids.numel():
            # Pieces share the draw of the piece that their word starts with: the last before them that continues none.
            draw = draw.gather(1, torch.where(self._continues[token_ids], 0, columns).cummax(1).values)
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


class RegionAugmentation:
    """Drops each region of an image with a probability. An image that would lose all of its regions keeps them.

    Source: as `TextAugmentation`, with the probability 0.2.

    Args:
        probability: of each region to be dropped, above 0 and below 1.

    Raises:
        ValueError: the probability is out of bounds.
    """

    def __init__(self, probability: float = 0.2) -> None:
        if not 0 < probability < 1:
            raise ValueError(f"probability: expected a number above 0 and below 1, got {probability}")
        self.probability = probability

    def __call__(
        self,
        features: Tensor | Fragments,
        generator: torch.Generator | None = None,
        *,
        device: torch.device | str | None = None,
        non_blocking: bool = False,
    ) -> Fragments:
        """The regions that are left of n images, in their order.

        Args:
            features: (n, k, f), or Fragments of n images.
            generator: draws the regions, on the CPU; None: torch's own generator, which a run's saved state holds.
            device: where they are wanted; by default where they lie. Features travel whole, as they were read, so that
                page-locked memory serves.
            non_blocking: do not wait for them.
        """
        if isinstance(features, Fragments):
            shape, regions = (len(features), features.max_length), features.values
            there = torch.arange(shape[1]) < features.lengths.cpu()[:, None]
        else:
            shape, regions = (features.shape[0], features.shape[1]), features.flatten(0, 1)
            there = torch.ones(shape, dtype=torch.bool)
        if device is not None:
            regions = regions.to(device, non_blocking=non_blocking)
        kept = there & (torch.rand(shape, generator=generator) >= self.probability)
        kept |= there & ~kept.any(1, keepdim=True)
        lengths = kept.sum(1)
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        longest = int(lengths.max()) if len(lengths) else 0
        # By number and not by a mask, whose size a GPU would have to tell first.
        chosen = kept[there].nonzero().flatten().to(regions.device, non_blocking=non_blocking)
        offsets = offsets.to(regions.device, non_blocking=non_blocking)
        return Fragments(regions[chosen], offsets, check=False, max_length=longest)


class BatchAugmentation:
    """What training changes in a batch.

    Args:
        vocabulary: that of the captions.
        words: the probability of `TextAugmentation`; 0: captions stay as they are.
        regions: the probability of `RegionAugmentation`; 0: images stay as they are.
    """

    def __init__(self, vocabulary: Vocabulary, *, words: float = 0.0, regions: float = 0.0) -> None:
        self._words = TextAugmentation(vocabulary, words) if words else None
        self._regions = RegionAugmentation(regions) if regions else None

    def __call__(self, batch: Batch, device: torch.device | str | None = None, *, non_blocking: bool = False) -> Batch:
        """Another batch on `device`, by default where the given one lies, drawn from torch's own generator of the CPU.

        `non_blocking`: do not wait for copies of page-locked memory.
        """
        if self._words is not None:
            token_ids, lengths = self._words(batch.token_ids, batch.lengths)
            batch = attrs.evolve(batch, token_ids=token_ids, lengths=lengths)
        if self._regions is not None:
            features = self._regions(batch.features, device=device, non_blocking=non_blocking)
            batch = attrs.evolve(batch, features=features)
        return batch if device is None else batch.to(device, non_blocking=non_blocking)
