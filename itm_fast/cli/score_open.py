"""Open the scores and the data of `itm-fast score`.

Inside: `known_captions`, `open_data`, `open_scores`, `open_second`, `owners_of`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from itm_fast.cli.score_options import ScoreOptions

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from itm_fast.data import PrecomputedDataset
    from itm_fast.evaluation.opening import Opened
    from itm_fast.evaluation.score_sources import ScoreSource

__all__ = ["known_captions", "open_data", "open_scores", "open_second", "owners_of"]


def open_data(options: ScoreOptions) -> PrecomputedDataset | None:
    """Open the data for texts and pictures; its words are of no interest."""
    from itm_fast.data import Vocabulary, open_split

    return None if options.data is None else open_split(options.data, options.split, Vocabulary(Vocabulary.special))


def known_captions(options: ScoreOptions, dataset: PrecomputedDataset | None) -> int | None:
    """Return the number of captions by --caption-image or --data; None without both."""
    from itm_fast.data import layout

    if options.caption_image is None:
        return None if dataset is None else len(dataset)
    numbers = _array_of_owners(options.caption_image)
    return len(layout.read_lines(options.caption_image) if numbers is None else numbers)


def owners_of(options: ScoreOptions, source: ScoreSource, dataset: PrecomputedDataset | None) -> Tensor:
    """Return the index of the image of each caption."""
    import torch

    from itm_fast.data import layout

    if dataset is not None and (dataset.n_images, len(dataset)) != (source.n_images, source.n_captions):
        raise ValueError(
            f"{options.data}: split {options.split} has {dataset.n_images:,} images and {len(dataset):,} captions, the "
            f"scores have {source.n_images:,} and {source.n_captions:,}: scores of another split?"
        )
    if options.caption_image is not None:
        numbers = _array_of_owners(options.caption_image)
        if numbers is not None:
            return torch.from_numpy(_checked(options.caption_image, numbers, source))
        return torch.from_numpy(layout.read_caption_image(options.caption_image, source.n_images, source.n_captions))
    if dataset is not None:
        return dataset.caption_image
    return torch.arange(source.n_captions) // max(source.n_captions // source.n_images, 1)


def _array_of_owners(path: Path) -> npt.NDArray[np.int64] | None:
    """Return the numbers in a `.npy` file; None for a text file."""
    import numpy as np

    from itm_fast.files.arrays import open_array

    if path.suffix.lower() != ".npy":
        return None
    array = np.asarray(open_array(path))
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(f"{path}: expected whole numbers (captions,), found {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def _checked(path: Path, numbers: npt.NDArray[np.int64], source: ScoreSource) -> npt.NDArray[np.int64]:
    if len(numbers) != source.n_captions:
        raise ValueError(f"{path}: expected one number per caption ({source.n_captions:,}), found {len(numbers):,}")
    outside = (numbers < 0) | (numbers >= source.n_images)
    if outside.any():
        place = int(outside.argmax())
        raise ValueError(
            f"{path}: entry {place}: expected an image row from 0 to {source.n_images - 1}, got {numbers[place]}"
        )
    return numbers


def open_scores(options: ScoreOptions, n_captions: int | None) -> Opened:
    """Open the matrix or the embeddings; `n_captions` is their number, if it is known."""
    from itm_fast.evaluation.opening import open_embeddings, open_matrix

    embeddings = (options.image_embeddings, options.caption_embeddings)
    if options.scores is not None and embeddings == (None, None):
        if options.similarity != "cosine" or (options.image_key, options.caption_key) != (None, None):
            raise ValueError(
                "--similarity, --image-key and --caption-key are for embeddings, not for a score matrix; --key names "
                "an array of the file"
            )
        return open_matrix(
            options.scores, options.key, captions_first=options.captions_first, distances=options.distances,
            n_captions=n_captions,
        )  # fmt: skip
    if options.scores is not None or None in embeddings:
        raise ValueError("FILE: give either a score matrix, or --image-embeddings and --caption-embeddings")
    if options.captions_first or options.distances:
        raise ValueError("--captions-first and --distances are for a score matrix, not for embeddings")
    images, captions = (path for path in embeddings if path is not None)
    return open_embeddings(
        images,
        captions,
        options.image_key or options.key,
        options.caption_key or options.key,
        similarity=options.similarity,
        n_captions=n_captions,
    )


def open_second(options: ScoreOptions, first: Opened) -> Opened:
    """Open the matrix of --against, which must have the images and captions of `first`."""
    from itm_fast.evaluation.opening import open_matrix
    from itm_fast.files.arrays import open_array

    path = options.against
    assert path is not None
    n_images, n_captions = first.source.n_images, first.source.n_captions
    # A .npy file has no names, so --key is for the first file alone.
    key = options.against_key or (None if path.suffix.lower() == ".npy" else options.key)
    # The second file may be the other way round, which the number of captions tells if there are fewer images.
    captions_first = options.captions_first and open_array(path, key).shape[:1] == (n_captions,)
    second = open_matrix(path, key, captions_first=captions_first, distances=options.distances, n_captions=n_captions)
    if second.source.n_images != n_images:
        raise ValueError(
            f"{path}: expected scores of the same {n_images:,} images, found {second.source.n_images:,}: scores of "
            "another split?"
        )
    return second
