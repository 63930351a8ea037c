"""Find all problems of a feature store and compare its files with their checksums.

Inside: `check_store`, `check_vocabulary`, `StoreReport`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import attrs
from tqdm import tqdm

from itm_fast.data import store_format
from itm_fast.data.check_split import Problem, without_path
from itm_fast.data.digests import sha256_of_file
from itm_fast.data.store_format import SplitRecord
from itm_fast.data.store_index import check_captions, check_token_ids
from itm_fast.data.vocabulary import Vocabulary
from itm_fast.files import regular

Content = TypeVar("Content")

__all__ = ["StoreReport", "check_store", "check_vocabulary"]


@attrs.frozen
class StoreReport:
    """The result of a check: the splits as the manifest records them, those with boxes, and the problems."""

    folder: str
    dtype: str
    splits: list[SplitRecord]
    boxes: list[str]
    problems: list[Problem]


def check_store(
    directory: str | os.PathLike[str], splits: Sequence[str] = (), *, progress: bool = False
) -> StoreReport:
    """Read all files of a feature store and list those that differ from what `pack` wrote.

    Args:
        directory: the store.
        splits: the splits to check; default: all.
        progress: show a progress bar on a terminal.

    Raises:
        ValueError: the manifest cannot be read, or does not contain a split. The report contains all other problems.
    """
    folder = Path(directory)
    manifest = store_format.read_manifest(folder)
    for name in splits:
        if manifest.split(name) is None:
            raise ValueError(f"{folder}: there is no split {name!r} in this feature store")
    chosen = [split for split in manifest.splits if not splits or split.name in splits]
    problems: list[Problem] = []
    boxes: list[str] = []
    total = sum(shard.bytes for split in chosen for shard in split.shards)
    vocabulary = _check(
        folder / store_format.VOCABULARY, problems, lambda path: check_vocabulary(path, manifest.vocabulary)
    )
    with tqdm(total=total, unit="B", unit_scale=True, disable=None if progress else True) as bar:
        for split in chosen:
            bar.set_description_str(split.name)

            def check_index(path: Path, split: SplitRecord = split) -> None:
                index = store_format.read_index(path, split)
                if "boxes" in index:
                    boxes.append(split.name)
                if vocabulary is not None:
                    check_token_ids(path, index, vocabulary)
                    check_captions(path, index, vocabulary)

            _check(folder / split.index, problems, check_index)
            for shard in split.shards:
                path = folder / shard.file

                def compare(path: Path, split: SplitRecord = split, shard: store_format.ShardRecord = shard) -> None:
                    store_format.check_shard(path, manifest.dtype, shard, split.width)
                    if sha256_of_file(path, bar.update) != shard.sha256:
                        raise ValueError(f"{path}: damaged: its checksum is not that of the store")

                _check(path, problems, compare)
    pictures = folder / store_format.PICTURES_FOLDER
    try:
        store_format.check_finished(pictures)
        if store_format.is_store(pictures):
            inner = check_store(pictures, splits, progress=progress).problems
            problems += [attrs.evolve(one, file=f"{pictures.name}/{one.file}") for one in inner]
    except ValueError as error:
        problems.append(Problem(pictures.name, without_path(error, pictures)))
    return StoreReport(str(folder), manifest.dtype, chosen, boxes, problems)


def _check(path: Path, problems: list[Problem], read: Callable[[Path], Content]) -> Content | None:
    """Return what `read` returns for a file. If it fails, add a problem and return None."""
    try:
        return read(path)
    except (ValueError, OSError) as error:
        problems.append(Problem(path.name, without_path(error, path)))
        return None


def check_vocabulary(path: Path, digest: str) -> Vocabulary:
    """Read the vocabulary of a store.

    Raises:
        ValueError: the file is missing or damaged, or its digest differs. The message names it.
    """
    if not regular.is_file(path):
        raise ValueError(f"{path}: no such file")
    vocabulary = Vocabulary.from_file(path)
    if store_format.vocabulary_digest(vocabulary) != digest:
        raise ValueError(f"{path}: not the vocabulary that the captions were tokenised with")
    return vocabulary
