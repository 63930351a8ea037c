"""Size augmentation for training: change and drop words of captions, and drop regions of images.

Inside: `TextAugmentation`, `RegionAugmentation`, and `BatchAugmentation`, which applies both.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from itm_fast.data.dataset import Batch
from itm_fast.data.tagged_images import TaggedImages
from itm_fast.data.vocabulary import Vocabulary
from itm_fast.fragments import Fragments

# Shares of the changed words that become `<mask>` and that become another word. The rest are deleted.
_MASKED, _REPLACED = 0.5, 0.1


class TextAugmentation:
    """Change each word of a caption with a probability: half to `<mask>`, a tenth to a random word, the rest deleted.

    `<start>` and `<end>` do not change. Random words exclude `<pad>`, `<start>`, `<end>`, `<unk>` and `<mask>`. A
    caption that would lose all words does not change. All pieces of a word in a BERT vocabulary change together, each
    to a different random piece. Source: Chen et al., "Learning the Best Pooling Strategy for Visual Semantic Embedding"
    (CVPR 2021). Their code uses the probability 0.2.

    Args:
        vocabulary: must have `<mask>`; `Vocabulary.with_mask` adds it.
        probability: the probability that a word changes, above 0 and at most 1.

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
        """Return changed captions. The arguments do not change.

        Args:
            token_ids: (n, L) int64 on the CPU; each row has `<start>`, words, `<end>` and padding.
            lengths: (n,) int64, including `<start>` and `<end>`.
            generator: draws the changes; None: torch's default generator, which the saved state of a run contains.

        Returns:
            Token ids (n, L') int64, padded with `<pad>`, and lengths (n,) int64.
        """
        columns = torch.arange(token_ids.shape[1])
        inside = columns < lengths[:, None]
        is_word = inside & (columns > 0) & (columns < lengths[:, None] - 1)
        # Uniform in [0, 1) for words that change, at least 1 for the others.
        draw = torch.rand(token_ids.shape, generator=generator) / self.probability
        if self._continues is not None and token_ids.numel():
            # All pieces of a word use the draw of its first piece: the last piece so far without "##".
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
    """Drop each region of an image with a probability. An image that would lose all regions keeps them.

    Source: as `TextAugmentation`, with the probability 0.2.

    Args:
        probability: the probability that a region is dropped, above 0 and below 1.

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
        """Return the remaining regions of n images in order.

        Args:
            features: (n, k, f), or Fragments of n images.
            generator: draws the regions, on the CPU; None: torch's default generator, which the saved state of a run
                contains.
            device: the device of the result; default: that of `features`. All regions are copied before some are
                dropped, so that copies from page-locked memory are asynchronous.
            non_blocking: do not wait for the copies.
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
        # Index by number: the number of true values in a mask would have to be read from the GPU first.
        chosen = kept[there].nonzero().flatten().to(regions.device, non_blocking=non_blocking)
        offsets = offsets.to(regions.device, non_blocking=non_blocking)
        return Fragments(regions[chosen], offsets, check=False, max_length=longest)


class BatchAugmentation:
    """Apply text and region augmentation to batches.

    Args:
        vocabulary: the vocabulary of the captions; None: unknown.
        words: the probability of `TextAugmentation`; 0: captions do not change.
        regions: the probability of `RegionAugmentation`; 0: images do not change.

    Raises:
        ValueError: words are to be changed, but the vocabulary is unknown.
    """

    def __init__(self, vocabulary: Vocabulary | None, *, words: float = 0.0, regions: float = 0.0) -> None:
        if words and vocabulary is None:
            raise ValueError("text_augmentation: needs the vocabulary of the captions, which this data set lacks")
        self._words = TextAugmentation(vocabulary, words) if words and vocabulary else None
        self._regions = RegionAugmentation(regions) if regions else None

    def __call__(self, batch: Batch, device: torch.device | str | None = None, *, non_blocking: bool = False) -> Batch:
        """Return an augmented batch. torch's default CPU generator draws the changes.

        Args:
            batch: the batch.
            device: the device of the result; default: that of `batch`.
            non_blocking: do not wait for copies from page-locked memory.
        """
        if self._words is not None:
            token_ids, lengths = self._words(batch.token_ids, batch.lengths)
            batch = attrs.evolve(batch, token_ids=token_ids, lengths=lengths)
        if self._regions is not None:
            images = batch.features
            regions = images.regions if isinstance(images, TaggedImages) else images
            kept = self._regions(regions, device=device, non_blocking=non_blocking)
            features = images.with_regions(kept) if isinstance(images, TaggedImages) else kept
            batch = attrs.evolve(batch, features=features)
        return batch if device is None else batch.to(device, non_blocking=non_blocking)
