"""Recalls from embeddings by itm_fast, by the loop of the field's evaluation scripts and by other packages.

Inside: `EVALUATIONS`, `RecallCase`, `exact_recalls`, `make_evaluation`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import itm_fast.functional as F_itm
from itm_fast.evaluation import RetrievalRecall

__all__ = ["CAPTIONS", "EVALUATIONS", "RecallCase", "exact_recalls", "make_evaluation"]

AT = (1, 5, 10)
CAPTIONS = 5
TILE = 500
Recalls = list[float]  # In percent: image to text at 1, 5 and 10, then text to image.


@dataclass(frozen=True)
class RecallCase:
    """A number of images with five captions each, and the width of the embeddings."""

    images: int
    dim: int

    def embeddings(self) -> tuple[Tensor, Tensor]:
        """Return unit rows: `(images, dim)`, and captions `(5 images, dim)` that are noisy copies of their image."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.images, self.dim, generator=generator)
        noise = torch.randn(CAPTIONS * self.images, self.dim, generator=generator)
        captions = images.repeat_interleave(CAPTIONS, 0) + 5.0 * noise
        normalize = torch.nn.functional.normalize
        return normalize(images, dim=1), normalize(captions, dim=1)


def _owners(images: Tensor) -> Tensor:
    return torch.arange(len(images)).repeat_interleave(CAPTIONS)


def _tiled(images: Tensor, captions: Tensor) -> Recalls:
    """`RetrievalRecall`, which never has the whole matrix."""
    metric = RetrievalRecall(similarity="dot")
    metric.update(images, captions, torch.arange(len(images)), _owners(images))
    found = metric.compute()
    return [found[f"{way}_r{k}"] for way in ("i2t", "t2i") for k in AT]


def _matrix(images: Tensor, captions: Tensor) -> Recalls:
    """The whole score matrix, then `retrieval_ranks`."""
    found = F_itm.recall_summary(*F_itm.retrieval_ranks(images @ captions.t(), _owners(images)))
    return [found[f"{way}_r{k}"] for way in ("i2t", "t2i") for k in AT]


def _loop(images: Tensor, captions: Tensor) -> Recalls:
    """One sort for each image and each caption, as evaluation scripts of the field do."""
    scores = (images @ captions.t()).numpy()
    ranks = np.empty(len(images))
    for image, row in enumerate(scores):
        places = np.empty(len(row), dtype=np.int64)
        places[np.argsort(row)[::-1]] = np.arange(len(row))
        ranks[image] = places[CAPTIONS * image : CAPTIONS * (image + 1)].min()
    own = np.empty(len(captions))
    for caption, column in enumerate(scores.T):
        own[caption] = np.nonzero(np.argsort(column)[::-1] == caption // CAPTIONS)[0][0]
    return [100.0 * float((found < k).mean()) for found in (ranks, own) for k in AT]


def _torch_topk(images: Tensor, captions: Tensor) -> Recalls:
    """The ten best of the whole score matrix in plain PyTorch."""
    scores = images @ captions.t()
    best = scores.topk(AT[-1], dim=1).indices // CAPTIONS == torch.arange(len(images))[:, None]
    own = scores.t().topk(AT[-1], dim=1).indices == _owners(images)[:, None]
    return [100.0 * float(found[:, :k].any(1).double().mean()) for found in (best, own) for k in AT]


def _faiss(images: Tensor, captions: Tensor) -> Recalls:
    """Exact search of the ten best; faiss has no whole matrix either."""
    faiss = importlib.import_module("faiss")
    faiss.omp_set_num_threads(torch.get_num_threads())

    def best(queries: Tensor, items: Tensor) -> np.ndarray:
        index = faiss.IndexFlatIP(items.shape[1])
        index.add(items.numpy())
        places: np.ndarray = index.search(queries.numpy(), AT[-1])[1]
        return places

    hits = best(images, captions) // CAPTIONS == np.arange(len(images))[:, None]
    own = best(captions, images) == _owners(images).numpy()[:, None]
    return [100.0 * float(found[:, :k].any(1).mean()) for found in (hits, own) for k in AT]


def _torchmetrics_functional(images: Tensor, captions: Tensor) -> Recalls:
    """One call of `retrieval_hit_rate` for each query and k."""
    hit_rate = importlib.import_module("torchmetrics.functional.retrieval").retrieval_hit_rate
    scores, owners = images @ captions.t(), _owners(images)
    recalls = []
    for rows, targets in (
        (scores, lambda image: owners == image),
        (scores.t().contiguous(), lambda caption: torch.arange(len(images)) == caption // CAPTIONS),
    ):
        hits = torch.zeros(len(AT), dtype=torch.float64)
        for number, row in enumerate(rows):
            target = targets(number)
            hits += torch.stack([hit_rate(row, target, top_k=k) for k in AT])
        recalls += (100 * hits / len(rows)).tolist()
    return recalls


def _torchmetrics(images: Tensor, captions: Tensor) -> Recalls:
    """A collection of `RetrievalHitRate`, updated by tiles of queries."""
    collection = importlib.import_module("torchmetrics").MetricCollection
    hit_rate = importlib.import_module("torchmetrics.retrieval").RetrievalHitRate
    owners, everyone = _owners(images), torch.arange(len(images))
    recalls = []
    for queries, numbers, items, item_numbers in (
        (images, everyone, captions, owners),
        (captions, owners, images, everyone),
    ):
        metrics = collection({str(k): hit_rate(top_k=k) for k in AT})
        for first in range(0, len(queries), TILE):
            scores = queries[first : first + TILE] @ items.t()
            target = numbers[first : first + TILE, None] == item_numbers
            indexes = torch.arange(first, first + len(scores))[:, None].expand_as(scores)
            metrics.update(scores.flatten(), target.flatten(), indexes=indexes.flatten())
        found = metrics.compute()
        recalls += [100 * float(found[str(k)]) for k in AT]
    return recalls


EVALUATIONS: dict[str, Callable[[Tensor, Tensor], Recalls]] = {
    "itm_fast, by tiles": _tiled,
    "itm_fast, whole matrix": _matrix,
    "faiss-cpu, exact search": _faiss,
    "plain PyTorch, topk": _torch_topk,
    "NumPy, a sort for each query": _loop,
    "torchmetrics, function for each query": _torchmetrics_functional,
    "torchmetrics, metric classes": _torchmetrics,
}
SLOW = ("torchmetrics, function for each query", "torchmetrics, metric classes")


def make_evaluation(name: str, case: RecallCase, small: bool = False) -> Callable[[], Recalls]:
    """Return a call that computes the six recalls from embeddings."""
    images, captions = (RecallCase(12, 8) if small else case).embeddings()
    return lambda: EVALUATIONS[name](images, captions)


def exact_recalls(case: RecallCase) -> Recalls:
    """Count the ranks in float64, tile by tile."""
    images, captions = (side.double() for side in case.embeddings())
    numbers, own = torch.arange(len(images)), (captions.view(len(images), CAPTIONS, -1) * images[:, None]).sum(2)
    of_images, of_captions = torch.zeros(len(images)), torch.zeros(len(captions))
    for rows in numbers.split(TILE):
        scores = images[rows] @ captions.t()
        foreign = _owners(images) != rows[:, None]
        of_images[rows] = ((scores > own[rows].amax(1, keepdim=True)) & foreign).sum(1).float()
        of_captions += ((scores > own.flatten()) & foreign).sum(0)
    return [100.0 * float((ranks < k).double().mean()) for ranks in (of_images, of_captions) for k in AT]
