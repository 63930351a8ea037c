"""Scores of all pairs of images and captions, read in tiles from a matrix or computed from two sets of embeddings.

Inside: `ScoreSource`, `MatrixScores`, `EmbeddingScores`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from itm_fast.files.arrays import Array

__all__ = ["SIMILARITIES", "EmbeddingScores", "MatrixScores", "ScoreSource"]

SIMILARITIES = ("cosine", "dot")
# Pairs that are scored at a time.
_PAIRS = 8192
# Smallest norm in a cosine, so that a row of zeros scores 0.
_TINY = 1e-12


class ScoreSource(Protocol):
    """Scores of `n_images` images and `n_captions` captions; indices are int64 `(n,)`."""

    n_images: int
    n_captions: int

    def tile(self, images: Tensor, captions: Tensor) -> Tensor:
        """Return the scores `(len(images), len(captions))`, float32 or float64."""

    def pairs(self, images: Tensor, captions: Tensor) -> Tensor:
        """Return the scores `(n,)` of the pairs of `images` `(n,)` and `captions` `(n,)`."""


class MatrixScores:
    """Scores in an array, which may be a memory map.

    Args:
        array: real numbers, `(n_images * every, n_captions)`.
        captions_first: the array is `(n_captions, n_images * every)`.
        every: how often the array stores each image, in consecutive rows.
        distances: the numbers are distances; scores are their negatives.
    """

    def __init__(self, array: Array, *, captions_first: bool = False, every: int = 1, distances: bool = False) -> None:
        self._array, self._captions_first, self._every, self._sign = (
            array,
            captions_first,
            every,
            -1 if distances else 1,
        )
        n_rows, n_captions = array.shape[::-1] if captions_first else array.shape
        self.n_captions = int(n_captions)
        self.n_images = int(n_rows) // every

    def tile(self, images: Tensor, captions: Tensor) -> Tensor:
        first, second = self._ordered(images, captions)
        array: Any = self._array
        block = _numbers(array[_key(first)][:, _key(second)])
        return self._signed(block.t() if self._captions_first else block)

    def pairs(self, images: Tensor, captions: Tensor) -> Tensor:
        first, second = self._ordered(images, captions)
        array: Any = self._array
        return self._signed(_numbers(array[first.numpy(), second.numpy()]))

    def _ordered(self, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
        images = images * self._every
        return (captions, images) if self._captions_first else (images, captions)

    def _signed(self, scores: Tensor) -> Tensor:
        return scores if self._sign == 1 else -scores


class EmbeddingScores:
    """Inner products of embeddings, computed tile by tile.

    Args:
        images: `(n_images * every, d)`.
        captions: `(n_captions, d)`.
        similarity: "cosine" or "dot".
        every: how often `images` stores each image, in consecutive rows.
    """

    def __init__(self, images: Array, captions: Array, *, similarity: str = "cosine", every: int = 1) -> None:
        self._images, self._captions, self._every = images, captions, every
        self._cosine = similarity == "cosine"
        self.n_images, self.n_captions = images.shape[0] // every, captions.shape[0]

    def tile(self, images: Tensor, captions: Tensor) -> Tensor:
        rows, columns = self._image_rows(images), self._caption_rows(captions)
        kind = torch.promote_types(rows.dtype, columns.dtype)
        return rows.to(kind) @ columns.to(kind).t()

    def pairs(self, images: Tensor, captions: Tensor) -> Tensor:
        return _products(self._image_rows, self._caption_rows, images, captions)

    def image_pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the scores of pairs of images."""
        return _products(self._image_rows, self._image_rows, first, second)

    def caption_pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the scores of pairs of captions."""
        return _products(self._caption_rows, self._caption_rows, first, second)

    def _image_rows(self, images: Tensor) -> Tensor:
        return self._rows(self._images, images * self._every)

    def _caption_rows(self, captions: Tensor) -> Tensor:
        return self._rows(self._captions, captions)

    def _rows(self, array: Any, indices: Tensor) -> Tensor:
        rows = _numbers(array[_key(indices)])
        return rows / rows.norm(dim=1, keepdim=True).clamp(min=_TINY) if self._cosine else rows


def _products(
    first_rows: Callable[[Tensor], Tensor], second_rows: Callable[[Tensor], Tensor], first: Tensor, second: Tensor
) -> Tensor:
    parts = [
        (first_rows(one) * second_rows(other)).sum(1)
        for one, other in zip(first.split(_PAIRS), second.split(_PAIRS), strict=True)
    ]
    return torch.cat(parts)


def _key(indices: Tensor) -> Any:
    """Return a slice for evenly spaced indices, because a memory map then copies nothing else."""
    if len(indices) == 0:
        return slice(0, 0)
    first = int(indices[0])
    step = int(indices[1]) - first if len(indices) > 1 else 1
    if step > 0 and torch.equal(indices, torch.arange(first, first + step * len(indices), step)):
        return slice(first, first + step * (len(indices) - 1) + 1, step)
    return indices.numpy()


def _numbers(block: Array) -> Tensor:
    """Copy a block to the memory as float32, or float64 if float32 is too narrow for its type."""
    if isinstance(block, Tensor):
        narrow = block.dtype in (torch.float16, torch.bfloat16, torch.float32)
        return block.to(torch.float32 if narrow else torch.float64)
    narrow = block.dtype.kind == "f" and block.dtype.itemsize <= 4
    return torch.from_numpy(np.array(block, dtype=np.float32 if narrow else np.float64))
