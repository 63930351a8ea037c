"""`ImageSamples`: each image of a batch once, beside the words of all its captions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from itm_fast.fragments import Fragments
from itm_fast.models import FragmentModel
from itm_fast.training.scenario import BatchFunctions

__all__ = ["ImageSamples"]


class ImageSamples:
    """Read all captions of the images of a batch, and join the words of each image.

    Args:
        caption_image: (n_captions,) int64, the image of each caption of the training split.
    """

    def __init__(self, caption_image: Tensor) -> None:
        images = caption_image.cpu()
        # Captions in the order of their images, and where those of each image begin.
        self._captions = images.argsort(stable=True)
        counts = torch.bincount(images)
        self._ends = counts.cumsum(0)
        self._counts = counts

    def __call__(
        self, batch: BatchFunctions, model: FragmentModel, *, scored: bool
    ) -> tuple[Tensor, Tensor | None, Fragments, Fragments]:
        """Return images (n,), scores (n, n) or None, regions and words of n sets each.

        The score of an image with another image's captions is the highest of them.
        """
        images = batch.images.unique()
        where = images.cpu()
        counts = self._counts[where]
        starts = self._ends[where] - counts
        first = counts.cumsum(0) - counts
        within = torch.arange(int(counts.sum())) - first.repeat_interleave(counts)
        pairs = batch.read(self._captions[starts.repeat_interleave(counts) + within])
        with batch.autocast():
            encoded = model.encode_fragments(pairs.features, pairs.token_ids, pairs.lengths)
            first, counts = first.to(images.device), counts.to(images.device)
            scores = model.score(_chosen(encoded.images, first), encoded.captions) if scored else None
        if scores is not None:
            group = torch.arange(len(images), device=images.device).repeat_interleave(counts)
            best = scores.new_full((len(images), len(images)), -torch.inf)
            scores = best.scatter_reduce(1, group.expand(len(images), -1), scores, "amax")
        offsets = encoded.words.offsets[torch.cat([first, first[-1:] + counts[-1:]])]
        return images, scores, encoded.regions.index_select(first), Fragments(encoded.words.values, offsets)


def _chosen(embeddings: Any, items: Tensor) -> Any:
    return embeddings.index_select(items) if isinstance(embeddings, Fragments) else embeddings[items]
