"""Read what an index is built from: a data set, features, or pictures, as batches of named items.

Inside: `Batch`, `Source`, `Listed`, `named`, `size_of`, `batches_of`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from itm_fast.data import CaptionDataset
from itm_fast.data.picture_files import check_start
from itm_fast.data.picture_folder import pictures_in, refusal
from itm_fast.files.messages import shown
from itm_fast.fragments import Fragments
from itm_fast.search.pictures import Picture, features_of_squares, opened, picture_in, scaling_of, thumbnail
from itm_fast.search.results import Item

__all__ = ["Batch", "Listed", "Source", "batches_of", "named", "size_of"]

Listed = CaptionDataset | Tensor | np.ndarray | Fragments | Sequence[Picture]
Source = Listed | str | os.PathLike[str]


@attrs.frozen(eq=False)
class Batch:
    """Some items of one side.

    Attributes:
        items: their descriptions.
        features: (n, k, f) or Fragments for images; None for captions.
        thumbnails: a WebP file per image; empty where there is no picture.
    """

    items: list[Item]
    features: Tensor | Fragments | None
    thumbnails: list[bytes]


def named(source: Source, ids: Sequence[str] | None = None, prefix: str = "") -> tuple[Listed, list[str]]:
    """Return a source, a folder as the list of its pictures, and a name for each image.

    Args:
        source: a data set, features, a folder of pictures, or a list of pictures.
        ids: the names; None: those in the data set, the paths below the folder, or numbers from 0.
        prefix: goes before each name.

    Raises:
        ValueError: there is no picture or feature, the names are not as many as the images, or a name occurs twice or
            is empty.
    """
    own: Sequence[str] | None = None
    listed: Listed
    if isinstance(source, CaptionDataset):
        listed, own, count = source, source.image_ids, source.n_images
    elif isinstance(source, str | os.PathLike):
        paths = _picture_paths(Path(source))
        listed, own, count = paths, [path.relative_to(source).as_posix() for path in paths], len(paths)
    else:
        listed = source if isinstance(source, Tensor | np.ndarray | Fragments) else list(source)
        count = len(listed)
        if not count:
            raise ValueError("source: expected at least one item")
    names = list(ids if ids is not None else own if own is not None else map(str, range(count)))
    if len(names) != count:
        raise ValueError(f"ids: expected one per image ({count}), got {len(names)}")
    seen: set[str] = set()
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"ids: expected texts that are not empty, got {shown(name)}")
        if name in seen:
            raise ValueError(f"ids: {shown(name)} occurs twice")
        seen.add(name)
    return listed, [prefix + name for name in names]


def _picture_paths(folder: Path) -> list[Path]:
    """Return the picture files in a folder and its subfolders, sorted; ValueError if there are none."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder of pictures")
    found = pictures_in(folder, strict=True)
    if not found:
        raise ValueError(f"{folder}: contains no pictures that Pillow reads")
    return found


def size_of(source: Listed) -> int:
    """Return the number of items of a source, images and captions."""
    return source.n_images + len(source) if isinstance(source, CaptionDataset) else len(source)


def batches_of(
    source: Listed,
    names: Sequence[str],
    *,
    captions: Sequence[str] | None = None,
    pictures: str = "",
    thumbnails: bool = True,
    size: int,
    device: torch.device | str = "cpu",
    skipped: list[str] | None = None,
    progress: bool = False,
) -> Iterator[Batch]:
    """Yield the items of a source, at most `size` at a time, all images first.

    Args:
        source, names: as `named` returns them. The images and captions of a data set become items.
        captions: a text for each image of features or pictures, kept to be shown; None: none.
        pictures: how a picture becomes features, as `pictures.kind_of` returns it.
        thumbnails: make thumbnails.
        size: items per batch.
        device: where an encoder of pictures runs.
        skipped: takes one line for each picture that cannot be decoded, which is left out; None: an error.
        progress: show a progress bar on a terminal while the starts of the pictures are read.

    Raises:
        ValueError: the captions are not as many as the images, or a picture cannot be decoded.
    """
    if isinstance(source, CaptionDataset):
        if captions is not None:
            raise ValueError("captions: expected none, as the data set has its own")
        yield from _of_dataset(source, names, thumbnails, size)
        return
    count = len(names)
    if captions is not None and len(captions) != count:
        raise ValueError(f"captions: expected one per image ({count}), got {len(captions)}")
    pictures_given = [] if isinstance(source, Tensor | np.ndarray | Fragments) else source
    places = [str(Path(one).absolute()) if isinstance(one, str | os.PathLike) else "" for one in pictures_given]

    def items_of(numbers: Sequence[int]) -> list[Item]:
        return [
            Item(names[one], "images", () if captions is None else (captions[one],), places[one] if places else "")
            for one in numbers
        ]

    if isinstance(source, Tensor | np.ndarray | Fragments):
        for first in range(0, count, size):
            numbers = range(first, min(first + size, count))
            features = (
                source.index_select(torch.arange(first, numbers.stop))
                if isinstance(source, Fragments)
                else _features(source, first, numbers.stop)
            )
            yield Batch(items_of(numbers), features, [b""] * len(numbers))
        return
    scaling = scaling_of(pictures)
    # To encode pictures may take hours; most files that are no pictures are found before.
    bad = _without_start(pictures_given, progress)
    _report(list(bad.values()), skipped)
    good = [number for number in range(count) if number not in bad]
    for first in range(0, len(good), size):
        squares, files = {}, []
        for number in good[first : first + size]:
            try:
                image = opened(pictures_given[number])
            except ValueError as error:
                _report([str(error)], skipped)
                continue
            squares[number] = scaling.square(image)
            files.append(thumbnail(image, pictures) if thumbnails else b"")
        if squares:
            yield Batch(items_of(list(squares)), features_of_squares(list(squares.values()), pictures, device), files)


def _without_start(pictures: Sequence[Picture], progress: bool) -> dict[int, str]:
    """Return the errors of `check_start` for the pictures that are files, by their numbers."""
    found = {}
    files = {number: Path(one) for number, one in enumerate(pictures) if isinstance(one, str | os.PathLike)}
    for number, file in tqdm(files.items(), desc="look", unit="file", leave=False, disable=None if progress else True):
        try:
            check_start(file)
        except ValueError as error:
            found[number] = str(error)
    return found


def _report(bad: Sequence[str], skipped: list[str] | None) -> None:
    """Note pictures that are left out, or raise ValueError."""
    if skipped is not None:
        skipped += bad
    elif bad:
        raise refusal(bad, "pictures")


def _features(source: Tensor | np.ndarray, first: int, last: int) -> Tensor:
    if source.ndim != 3:
        raise ValueError(f"features: expected shape (images, regions, channels), got {tuple(source.shape)}")
    part = source[first:last]
    rows = (torch.from_numpy(np.array(part)) if isinstance(part, np.ndarray) else part).to(torch.float32)
    finite = rows.isfinite().flatten(1).all(1)
    if not bool(finite.all()):
        raise ValueError(f"features: row {first + int((~finite).nonzero()[0, 0])} holds values that are not finite")
    return rows


def _of_dataset(dataset: CaptionDataset, names: Sequence[str], thumbnails: bool, size: int) -> Iterator[Batch]:
    owners = dataset.caption_image.tolist()
    own: list[list[int]] = [[] for _ in names]
    for caption, image in enumerate(owners):
        own[image].append(caption)
    for first in range(0, len(names), size):
        numbers = range(first, min(first + size, len(names)))
        items = [
            Item(names[image], "images", tuple(dataset.captions[caption] for caption in own[image]))
            for image in numbers
        ]
        files = [_thumbnail_in(dataset, image) if thumbnails else b"" for image in numbers]
        yield Batch(items, dataset.image_batch(list(numbers)).to(torch.float32), files)
    order = [(image, place, caption) for image, all_own in enumerate(own) for place, caption in enumerate(all_own)]
    for first in range(0, len(order), size):
        part = order[first : first + size]
        items = [
            Item(f"{names[image]}#{place}", "captions", (dataset.captions[caption],), image=names[image])
            for image, place, caption in part
        ]
        yield Batch(items, None, [b""] * len(items))


def _thumbnail_in(dataset: CaptionDataset, image: int) -> bytes:
    pixels = picture_in(dataset, image)
    return b"" if pixels is None else thumbnail(pixels)
