"""Read what an index is built from: a data set, features, or pictures, as batches of named items.

Inside: `Batch`, `batches_of`, `new_pictures`, `Source`.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import Tensor

from itm_fast.data import CaptionDataset
from itm_fast.data.picture_folder import pictures_in
from itm_fast.files.messages import shown
from itm_fast.fragments import Fragments
from itm_fast.search.pictures import Picture, features_of, picture_in, thumbnail
from itm_fast.search.results import Item

__all__ = ["Batch", "Source", "batches_of", "new_pictures", "picture_paths", "size_of"]

Source = CaptionDataset | Tensor | np.ndarray | Fragments | Sequence[Picture] | str | os.PathLike[str]


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


def picture_paths(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the picture files in a folder and its subfolders, sorted; ValueError if there are none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder of pictures")
    found = pictures_in(folder, strict=True)
    if not found:
        raise ValueError(f"{folder}: contains no pictures that Pillow reads")
    return found


def new_pictures(folder: str | os.PathLike[str], known: Container[str]) -> tuple[dict[str, Path], int]:
    """Return the pictures in a folder whose ids are not `known`, by id, and the number of the others.

    The id of a picture is its path below the folder. Raises as `picture_paths`.
    """
    paths = picture_paths(folder)
    new = {name: path for name, path in zip(_ids_of(paths, folder), paths, strict=True) if name not in known}
    return new, len(paths) - len(new)


def _ids_of(paths: Sequence[Path], folder: str | os.PathLike[str]) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in paths]


def size_of(source: Source) -> int:
    """Return the number of items of a source, images and captions; for a folder, the number of its pictures."""
    if isinstance(source, CaptionDataset):
        return source.n_images + len(source)
    if isinstance(source, str | os.PathLike):
        return len(picture_paths(source))
    return len(source)


def batches_of(
    source: Source, *, ids: Sequence[str] | None, captions: Sequence[str] | None, pictures: str, thumbnails: bool,
    size: int,
) -> Iterator[Batch]:  # fmt: skip
    """Yield the items of a source, at most `size` at a time, all images first.

    Args:
        source: a data set, whose images and captions become items; features (n, k, f) or Fragments; a folder of
            pictures; or a list of pictures.
        ids: a name for each image; None: the names in the data set, the paths below the folder, or numbers from 0.
        captions: a text for each image of features or pictures, kept to be shown; None: none.
        pictures: how a picture becomes features, as `pictures.kind_of` returns it.
        thumbnails: make thumbnails.
        size: items per batch.

    Raises:
        ValueError: the names are not as many as the images, or a name occurs twice or is empty.
    """
    if isinstance(source, CaptionDataset):
        if captions is not None:
            raise ValueError("captions: expected none, as the data set has its own")
        yield from _of_dataset(source, _names(ids, source.image_ids, source.n_images), thumbnails, size)
        return
    own: list[str] | None = None
    pictures_given: list[Picture] = []
    if isinstance(source, str | os.PathLike):
        paths = picture_paths(source)
        pictures_given = list(paths)
        own = _ids_of(paths, source)
    elif not isinstance(source, Tensor | np.ndarray | Fragments):
        pictures_given = list(source)
    count = len(pictures_given) if own is not None else size_of(source)
    if not count:
        raise ValueError("source: expected at least one item")
    names = _names(ids, own, count)
    if captions is not None and len(captions) != count:
        raise ValueError(f"captions: expected one per image ({count}), got {len(captions)}")
    places = [str(Path(one).absolute()) if isinstance(one, str | os.PathLike) else "" for one in pictures_given]
    for first in range(0, count, size):
        last = min(first + size, count)
        items = [
            Item(
                names[number],
                "images",
                () if captions is None else (captions[number],),
                places[number] if places else "",
            )
            for number in range(first, last)
        ]
        files = [b""] * (last - first)
        features: Tensor | Fragments
        if isinstance(source, Fragments):
            features = source.index_select(torch.arange(first, last))
        elif isinstance(source, Tensor | np.ndarray):
            features = _features(source, first, last)
        else:
            chosen = pictures_given[first:last]
            features = features_of(chosen, pictures)
            files = [thumbnail(one, pictures) for one in chosen] if thumbnails else files
        yield Batch(items, features, files)


def _features(source: Tensor | np.ndarray, first: int, last: int) -> Tensor:
    if source.ndim != 3:
        raise ValueError(f"features: expected shape (images, regions, channels), got {tuple(source.shape)}")
    part = source[first:last]
    rows = (torch.from_numpy(np.array(part)) if isinstance(part, np.ndarray) else part).to(torch.float32)
    finite = rows.isfinite().flatten(1).all(1)
    if not bool(finite.all()):
        raise ValueError(f"features: row {first + int((~finite).nonzero()[0, 0])} holds values that are not finite")
    return rows


def _names(given: Sequence[str] | None, own: Sequence[str] | None, count: int) -> list[str]:
    names = list(given if given is not None else own if own is not None else map(str, range(count)))
    if len(names) != count:
        raise ValueError(f"ids: expected one per image ({count}), got {len(names)}")
    seen: set[str] = set()
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"ids: expected texts that are not empty, got {shown(name)}")
        if name in seen:
            raise ValueError(f"ids: {shown(name)} occurs twice")
        seen.add(name)
    return names


def _of_dataset(dataset: CaptionDataset, names: list[str], thumbnails: bool, size: int) -> Iterator[Batch]:
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
