"""Recalls as a metric with the interface of torchmetrics, which it does not need.

Inside: `RetrievalRecall`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from itm_fast.evaluation.array_likes import ArrayLike, as_integers, as_tensor
from itm_fast.evaluation.protocols import evaluate_scores
from itm_fast.evaluation.ranking import rank_folds, summarize
from itm_fast.evaluation.score_sources import SIMILARITIES, EmbeddingScores

__all__ = ["RetrievalRecall"]

# Up to this many scores are a matrix, which the native kernel of `retrieval_ranks` ranks: 128 MB in float32.
_WHOLE = 2**25


class RetrievalRecall:
    """Collect embeddings batch by batch, and rank all images and captions that were collected.

    `update`, `compute`, `reset` and a call behave like those of a metric of torchmetrics: a call updates the metric and
    returns the value of its batch alone. Embeddings are kept on the CPU. The kernel of `retrieval_ranks` counts the
    ranks. More than 32 million scores are computed and counted in tiles.

    Args:
        similarity: "cosine" or "dot".
        ties: "pessimistic" or "optimistic", as in `itm_fast.functional.retrieval_ranks`.

    Examples:
        >>> import torch
        >>> from itm_fast.evaluation import RetrievalRecall
        >>> metric = RetrievalRecall()
        >>> for batch in torch.eye(6).view(3, 2, 6):
        ...     numbers = batch.argmax(1)
        ...     metric.update(batch, batch, numbers)
        >>> metric.compute()["rsum"]
        600.0
    """

    higher_is_better = True

    def __init__(self, *, similarity: str = "cosine", ties: str = "pessimistic") -> None:
        if similarity not in SIMILARITIES:
            raise ValueError(f"similarity: expected {' or '.join(SIMILARITIES)}, got {similarity!r}")
        if ties not in ("pessimistic", "optimistic"):
            raise ValueError(f"ties: expected pessimistic or optimistic, got {ties!r}")
        self._similarity, self._ties = similarity, ties
        self.reset()

    def reset(self) -> None:
        """Forget all embeddings."""
        self._places: dict[int, int] = {}
        self._images: list[Tensor] = []
        self._captions: list[Tensor] = []
        self._owners: list[Tensor] = []

    def update(
        self, images: ArrayLike, captions: ArrayLike, image_ids: ArrayLike, caption_image_ids: ArrayLike | None = None
    ) -> None:
        """Add the embeddings of a batch: tensors, arrays or lists.

        Args:
            images: `(n, d)`. An image may occur again, once per caption; its first embedding counts.
            captions: `(m, d)`.
            image_ids: number of each image, integers `(n,)`, in any order and range.
            caption_image_ids: number of the image of each caption, `(m,)`; None: that of `image_ids`, pair by pair.

        Raises:
            TypeError: embeddings are not numbers, or numbers of images not integers.
            ValueError: shapes do not fit.
        """
        images, captions = as_tensor("images", images), as_tensor("captions", captions)
        image_ids = owners = as_integers("image_ids", image_ids)
        if caption_image_ids is not None:
            owners = as_integers("caption_image_ids", caption_image_ids)
        for name, tensor, rows in (("image_ids", image_ids, len(images)), ("caption_image_ids", owners, len(captions))):
            if tensor.shape != (rows,):
                raise ValueError(f"{name}: expected shape ({rows},), got {tuple(tensor.shape)}")
        for name, tensor in (("images", images), ("captions", captions)):
            width = self._images[0].shape[1] if self._images else images.shape[-1]
            if tensor.ndim != 2 or tensor.shape[1] != width:
                raise ValueError(f"{name}: expected shape (n, {width}), got {tuple(tensor.shape)}")
        new = []
        for row, number in enumerate(image_ids.tolist()):
            if number not in self._places:
                self._places[number] = len(self._places)
                new.append(row)
        # Copies: the caller may use the memory again.
        self._images.append(images.detach()[new].cpu())
        self._captions.append(captions.detach().to("cpu", copy=True))
        self._owners.append(owners.detach().to("cpu", copy=True))

    def compute(self) -> dict[str, float]:
        """Return the recalls of everything collected: the keys of `evaluate`.

        Raises:
            ValueError: nothing was collected, or a caption's image was not.
        """
        if not self._places or not sum(map(len, self._captions)):
            raise ValueError("compute: expected at least one image and caption; call update first")
        owners = []
        for number in torch.cat(self._owners).tolist():
            if number not in self._places:
                raise ValueError(f"compute: no embedding of image {number}, to which a caption belongs")
            owners.append(self._places[number])
        source = EmbeddingScores(torch.cat(self._images), torch.cat(self._captions), similarity=self._similarity)
        n_images, n_captions = source.n_images, source.n_captions
        if n_images * n_captions <= _WHOLE:
            scores = source.tile(torch.arange(n_images), torch.arange(n_captions))
            return evaluate_scores(scores, torch.tensor(owners), ties=self._ties)
        return summarize(rank_folds(source, torch.tensor(owners), ties=self._ties))

    def __call__(
        self, images: ArrayLike, captions: ArrayLike, image_ids: ArrayLike, caption_image_ids: ArrayLike | None = None
    ) -> dict[str, float]:
        """Add a batch, and return the recalls of this batch alone.

        Raises:
            ValueError: as in `update` and `compute`, such as for a caption of an image of an earlier batch. Nothing is
                added then.
        """
        batch = RetrievalRecall(similarity=self._similarity, ties=self._ties)
        batch.update(images, captions, image_ids, caption_image_ids)
        # First, because a batch that has no value of its own must not be added.
        found = batch.compute()
        self.update(images, captions, image_ids, caption_image_ids)
        return found

    forward = __call__
