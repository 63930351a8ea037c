"""Open score matrices and embeddings of any repository, and find out how they are laid out.

Inside: `Opened`, `open_matrix`, `open_embeddings`.
"""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import Tensor

from itm_fast.evaluation.score_sources import SIMILARITIES, EmbeddingScores, MatrixScores
from itm_fast.files.arrays import Array, open_array

__all__ = ["Opened", "open_embeddings", "open_matrix"]

_REPEATS = 5
# Rows compared at a time.
_ROWS = 250


@attrs.frozen
class Opened:
    """Scores, and one line for each guess about their layout."""

    source: MatrixScores | EmbeddingScores
    notes: list[str]


def open_matrix(
    path: str | os.PathLike[str],
    key: str | None = None,
    *,
    captions_first: bool = False,
    distances: bool = False,
    n_captions: int | None = None,
) -> Opened:
    """Open a matrix of scores. Images are rows, captions are columns, unless the shape says otherwise.

    A matrix with more rows than columns is read as captions x images. A square one that stores each image five times in
    a row, as the evaluation of VSE++ and SCAN does, is read every five images.

    Args:
        path: the file, as in `itm_fast.files.arrays.open_array`.
        key: name of the matrix in a file of several arrays.
        captions_first: captions are rows.
        distances: the numbers are distances: the lowest match best.
        n_captions: the number of captions, if it is known.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: it holds no matrix, or its shape cannot be one of images and captions; one line says what was
            expected and found, and the likely cause.
    """
    path = Path(path)
    array = open_array(path, key)
    rows, columns = _sizes(path, array, "a score matrix (images, captions)")
    shape, notes = f"{rows:,} x {columns:,}", []
    every = 1
    if rows == columns and (axis := _repeated_axis(array)) is not None:
        captions_first, every = axis == 1, _REPEATS
        notes.append(f"{path}: {shape} stores each image five times in a row; every fifth is used")
    elif n_captions is not None:
        if n_captions not in (rows, columns):
            raise ValueError(
                f"{path}: expected {n_captions:,} captions as rows or columns, found {shape}: scores of another split?"
            )
        if not captions_first and columns != n_captions:
            if rows < columns:
                raise ValueError(
                    f"{path}: expected {n_captions:,} captions as columns, found {shape}: captions of another split? "
                    "If they are the rows, give --captions-first"
                )
            captions_first = True
            notes.append(_read_transposed(path, shape))
    elif captions_first and rows < columns:
        raise ValueError(
            f"{path}: expected at least as many captions (rows) as images (columns), found {shape}: are images "
            "the rows? Then leave out --captions-first"
        )
    elif not captions_first and rows > columns:
        captions_first = True
        notes.append(_read_transposed(path, shape))
    source = MatrixScores(array, captions_first=captions_first, every=every, distances=distances)
    _check_multiple(path, shape, source.n_images, source.n_captions, n_captions)
    return Opened(source, notes)


def open_embeddings(
    images: str | os.PathLike[str],
    captions: str | os.PathLike[str],
    image_key: str | None = None,
    caption_key: str | None = None,
    *,
    similarity: str = "cosine",
    n_captions: int | None = None,
) -> Opened:
    """Open embeddings of images and captions; scores are computed from them in tiles.

    Args:
        images: the file of the images, `(n_images, d)`, or with each image five times in a row.
        captions: the file of the captions, `(n_captions, d)`.
        image_key: name of the images' array in a file of several arrays.
        caption_key: name of the captions' array.
        similarity: "cosine" or "dot".
        n_captions: the number of captions, if it is known.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: a file holds no embeddings, or the two do not fit each other.
    """
    if similarity not in SIMILARITIES:
        raise ValueError(f"similarity: expected {' or '.join(SIMILARITIES)}, got {similarity!r}")
    images, captions = Path(images), Path(captions)
    of_images, of_captions = open_array(images, image_key), open_array(captions, caption_key)
    rows, width = _sizes(images, of_images, "embeddings (images, channels)")
    columns, other = _sizes(captions, of_captions, "embeddings (captions, channels)")
    if width != other:
        raise ValueError(
            f"{captions}: expected embeddings with {width:,} channels, as in {images}, found {other:,}: another model?"
        )
    if n_captions not in (None, columns):
        raise ValueError(
            f"{captions}: expected {n_captions:,} captions, found {columns:,}: embeddings of another split?"
        )
    every, notes = 1, []
    if rows == columns and _repeated_axis(of_images) == 0:
        every = _REPEATS
        notes.append(f"{images}: stores each of {rows // every:,} images five times in a row; every fifth is used")
    source = EmbeddingScores(of_images, of_captions, similarity=similarity, every=every)
    if source.n_images > columns and n_captions is None:
        raise ValueError(
            f"{captions}: expected at least as many captions as images, found {columns:,} captions and {rows:,} "
            "images: are the files exchanged?"
        )
    _check_multiple(captions, f"{rows:,} images and {columns:,} captions", source.n_images, columns, n_captions)
    return Opened(source, notes)


def _sizes(path: Path, array: Array, what: str) -> tuple[int, int]:
    if array.ndim != 2:
        raise ValueError(f"{path}: expected {what}, found shape {tuple(array.shape)}")
    if 0 in array.shape:
        raise ValueError(f"{path}: expected {what}, found the empty shape {tuple(array.shape)}")
    return int(array.shape[0]), int(array.shape[1])


def _read_transposed(path: Path, shape: str) -> str:
    return f"{path}: {shape}: read as captions x images, because images are the fewer; scores are images x captions"


def _check_multiple(path: Path, shape: str, n_images: int, n_captions: int, known: int | None) -> None:
    if known is None and n_captions % n_images:
        raise ValueError(
            f"{path}: found {shape}: {n_captions:,} captions are no multiple of {n_images:,} images, so their images "
            "are unknown: rows or columns missing? Give the image of each caption with --caption-image"
        )


def _repeated_axis(array: Array) -> int | None:
    """Return the axis along which five neighbours at a time are equal, but not all entries; None: there is none."""
    for axis in (0, 1):
        n = array.shape[axis]
        if n % _REPEATS or n == _REPEATS:
            continue
        groups = (_grouped(array, start, min(start + _ROWS, n), axis) for start in range(0, n, _ROWS))
        first = None
        differs = False
        for group in groups:
            if not _equal(group, group[:, :1].expand_as(group)):
                break
            first = group[0, 0] if first is None else first
            differs = differs or not _equal(group[:, 0], first.expand_as(group[:, 0]))
        else:
            if differs:
                return axis
    return None


def _equal(first: Tensor, second: Tensor) -> bool:
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _grouped(array: Array, start: int, stop: int, axis: int) -> Tensor:
    """Return rows or columns as `(groups, 5, entries)`, float64."""
    block = array[start:stop] if axis == 0 else array[:, start:stop]
    numbers = block.double() if isinstance(block, Tensor) else torch.from_numpy(np.array(block, dtype=np.float64))
    rows = numbers if axis == 0 else numbers.t()
    return rows.reshape(-1, _REPEATS, rows.shape[1])
