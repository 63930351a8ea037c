"""Match a folder of pictures with a file of captions, and divide the pictures into splits.

Inside: `Collection`, `SplitPictures`, `collect`, `refusal`, `pictures_in`.
"""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import TypeVar

import attrs
import numpy as np
from PIL import Image
from tqdm import tqdm

from itm_fast.data.caption_files import Row, read_caption_file
from itm_fast.data.picture_files import Look, decoded, look_at, near_duplicates, readable_formats
from itm_fast.data.tokenization import tokenize
from itm_fast.data.vocabulary import Vocabulary

__all__ = ["Collection", "SplitPictures", "collect", "pictures_in", "refusal"]

_DRAWN = ("train", "dev", "test")
Kept = TypeVar("Kept")


@attrs.frozen
class SplitPictures:
    """The pictures and captions of a split.

    Attributes:
        name: the split.
        names: the path of each picture below the folder.
        paths: the file of each picture.
        looks: what a first look found.
        captions: the captions in the order of their file.
        caption_image: the index of each caption's picture.
    """

    name: str
    names: list[str]
    paths: list[Path]
    looks: list[Look]
    captions: list[str]
    caption_image: list[int]


@attrs.frozen
class Collection:
    """The splits; one line for each thing left out; one line for each near-duplicate in two splits."""

    splits: list[SplitPictures]
    skipped: list[str]
    duplicates: list[str]


def collect(
    images: Path,
    captions: Path,
    *,
    shares: Sequence[float] = (0.8, 0.1, 0.1),
    seed: int = 0,
    skip_bad: bool = False,
    max_tokens: int | None = None,
    vocabulary: Vocabulary | None = None,
    workers: int = 0,
    progress: bool = False,
) -> Collection:
    """Read the captions, decode every picture once, and divide the pictures into splits.

    Args:
        images: the folder of pictures; folders in it are searched, too.
        captions: the file of captions, as in `read_caption_file`.
        shares: the shares of pictures in train, dev and test, if the file names no splits.
        seed: of the division.
        skip_bad: leave out pictures and captions that cannot be used; False: raise an error.
        max_tokens: maximum tokens of a caption, with those at its start and end; None: no limit.
        vocabulary: counts the tokens; None: each word is a token.
        workers: processes that decode; 0: this process.
        progress: show a progress bar on a terminal.

    Raises:
        ValueError: a file cannot be read, or a picture or caption cannot be used. The message names file and row.
    """
    if not images.is_dir():
        raise ValueError(f"{images}: {'expected a folder, found a file' if images.exists() else 'no such folder'}")
    is_division = len(shares) == len(_DRAWN) and min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6
    if not is_division or shares[0] == 0:
        given = ",".join(f"{share:g}" for share in shares)
        raise ValueError(f"split: expected three shares with a sum of 1, such as 0.8,0.1,0.1, got {given}")
    rows, skipped = read_caption_file(captions)
    rows = [_with_slashes(images, row) for row in rows]
    paths = _found(images, rows, skipped)
    rows = [row for row in rows if row.image in paths]
    known = {path.resolve() for path in paths.values()}
    skipped += [
        f"{path}: a picture without captions in {captions}"
        for path in pictures_in(images)
        if path.resolve() not in known
    ]
    if max_tokens is not None:
        before = rows
        rows = _short_enough(before, max_tokens, vocabulary, skipped)
        left = {row.image for row in rows}
        skipped += [
            f"{paths[name]}: no caption of the picture has at most {max_tokens} tokens"
            for name in dict.fromkeys(row.image for row in before)
            if name not in left
        ]
    if skipped and not skip_bad:
        raise refusal(skipped)
    looks = _look_at_all(rows, paths, skipped, workers, progress)
    if skipped and not skip_bad:
        raise refusal(skipped)
    rows = [row for row in rows if row.image in looks]
    if not rows:
        raise ValueError(f"{captions}: no picture with captions is left of {images}")
    split_of = _splits(captions, rows, {name: look.digest for name, look in looks.items()}, shares, seed)
    names = dict.fromkeys([name for name in _DRAWN if name in split_of.values()] + list(split_of.values()))
    splits = [_split(name, rows, split_of, paths, looks) for name in names]
    return Collection(splits, skipped, _duplicates(splits))


def _with_slashes(images: Path, row: Row) -> Row:
    """Return a row with slashes in its path, if the file was written on Windows."""
    path = PureWindowsPath(row.image)
    is_below = not path.is_absolute() and not path.drive and ".." not in path.parts
    if "\\" not in row.image or not is_below or (images / row.image).is_file():
        return row
    return attrs.evolve(row, image=path.as_posix())


def refusal(problems: Sequence[str], what: str = "pictures and captions") -> ValueError:
    """Return an error with the first problem and the number of the others; `what` names the things at fault."""
    more = f" ({len(problems) - 1:,} more problem{'s' * (len(problems) > 2)})" if len(problems) > 1 else ""
    return ValueError(f"{problems[0]}{more}; --skip-bad leaves such {what} out and lists them")


def _short_enough(rows: Sequence[Row], max_tokens: int, vocabulary: Vocabulary | None, skipped: list[str]) -> list[Row]:
    """Return the captions of at most `max_tokens` tokens; report the others."""
    kept = []
    for row in rows:
        count = len(tokenize(row.caption)) + 2 if vocabulary is None else len(vocabulary.encode(row.caption))
        if count <= max_tokens:
            kept.append(row)
        else:
            skipped.append(f"{row.place}: expected at most {max_tokens} tokens in a caption, got {count}")
    return kept


def _found(images: Path, rows: Sequence[Row], skipped: list[str]) -> dict[str, Path]:
    """Return the file of each picture that exists; report the others once."""
    firsts = {row.image: row for row in reversed(rows)}
    names = list(dict.fromkeys(row.image for row in rows))
    paths = {name: images / name for name in names if (images / name).is_file()}
    paths |= _elsewhere(images, [name for name in names if name not in paths], paths.values())
    found: dict[str, Path] = {}
    files: dict[Path, str] = {}
    for name in names:
        place = firsts[name].place
        if name not in paths:
            skipped.append(f"{place}: no such picture: {images / name}")
        elif (other := files.setdefault(paths[name].resolve(), name)) != name:
            skipped.append(f"{place}: {name} is the file of {other}: {paths[name]}")
        else:
            found[name] = paths[name]
    return found


def _elsewhere(images: Path, missing: Sequence[str], used: Iterable[Path]) -> dict[str, Path]:
    """Return the files of pictures that are not where their captions say, as far as they are certain.

    A file system may write the accents of a name as characters of their own. And published captions name folders such
    as val2014, which copies of the pictures may lack.
    """
    if not missing:
        return {}
    taken = {path.resolve() for path in used}
    free = [path for path in pictures_in(images) if path.resolve() not in taken]
    found = _unique((_composed(str(path.relative_to(images))), path) for path in free)
    paths = {name: found[_composed(name)] for name in missing if _composed(name) in found}
    by_name = _unique((Path(name).name, name) for name in missing if name not in paths)
    for base, name in by_name.items():
        flat = images / base
        if flat.is_file() and flat.resolve() not in taken and not (images / name).parent.exists():
            paths[name] = flat
    return paths


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _unique(pairs: Iterable[tuple[str, Kept]]) -> dict[str, Kept]:
    """Return the pairs whose first part occurs once."""
    pairs = list(pairs)
    counts = Counter(key for key, _ in pairs)
    return {key: value for key, value in pairs if counts[key] == 1}


def pictures_in(images: Path, *, strict: bool = False) -> list[Path]:
    """Return the files with a suffix of a format that Pillow reads, in all subfolders and linked folders, sorted.

    Names that begin with `._` are left out: macOS keeps a file's attributes under such a name beside it. A folder that
    is found twice, by its path and by a link, has its path.

    Raises:
        OSError: with `strict`, a folder cannot be read.
    """
    formats = readable_formats()
    suffixes = {suffix for suffix, name in Image.registered_extensions().items() if name in formats}
    found: list[Path] = []
    visited: set[tuple[int, int]] = set()
    left = [images]
    while left:
        links = []
        for top in left:
            for folder, subfolders, names in os.walk(top, onerror=_raise if strict else None):
                state = Path(folder).stat()
                # Links may lead to a folder again, also to one around them.
                if (state.st_dev, state.st_ino) in visited:
                    subfolders.clear()
                    continue
                visited.add((state.st_dev, state.st_ino))
                links += [path for path in (Path(folder) / name for name in sorted(subfolders)) if path.is_symlink()]
                paths = (Path(folder) / name for name in names if not name.startswith("._"))
                found += [path for path in paths if path.suffix.lower() in suffixes and path.is_file()]
        left = links
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


def _look_at_all(
    rows: Sequence[Row], paths: Mapping[str, Path], skipped: list[str], workers: int, progress: bool
) -> dict[str, Look]:
    """Decode each picture once; report those that cannot be decoded."""
    first = {row.image: row for row in reversed(rows)}
    names = list(dict.fromkeys(row.image for row in rows))
    found = decoded([paths[name] for name in names], look_at, workers)
    looks = {}
    bar = tqdm(found, total=len(names), unit=" pictures", desc="check", disable=None if progress else True)
    for name, look in zip(names, bar, strict=True):
        if isinstance(look, ValueError):
            skipped.append(f"{first[name].place}: {look}")
        else:
            looks[name] = look
    return looks


def _splits(
    captions: Path, rows: Sequence[Row], digests: Mapping[str, bytes], shares: Sequence[float], seed: int
) -> dict[str, str]:
    """Return the split of each picture: that of the file, else a drawn one. Copies of a file are drawn together."""
    named = {row.image: row for row in reversed(rows)}
    for row in rows:
        first = named[row.image]
        if row.split != first.split:
            here, there = (f"the split {one}" if one else "no split" for one in (row.split, first.split))
            raise ValueError(f"{row.place}: {row.image} is in {here}, but in {there} on {first.place}")
    without = next((row for row in rows if row.split is None), None)
    if without is None:
        return {row.image: str(row.split) for row in rows}
    if any(row.split is not None for row in rows):
        raise ValueError(f"{without.place}: no split, but other rows name one; name one in each row, or in none")
    # Sorted, so that the order of the rows has no effect.
    names = sorted(named)
    firsts = {digests[name]: name for name in reversed(names)}
    copies, names = names, sorted(firsts.values())
    order = np.random.default_rng(seed).permutation(len(names))
    # Dev and test have at least one picture, unless their share is 0.
    counts = [max(round(share * len(names)), int(share > 0)) for share in shares[1:]]
    if sum(counts) >= len(names):
        raise ValueError(f"{captions}: {len(names)} pictures are too few to divide into train, dev and test")
    drawn = ["dev"] * counts[0] + ["test"] * counts[1]
    drawn += ["train"] * (len(names) - len(drawn))
    split_of = {names[position]: split for position, split in zip(order, drawn, strict=True)}
    return {name: split_of[firsts[digests[name]]] for name in copies}


def _split(
    name: str,
    rows: Sequence[Row],
    split_of: Mapping[str, str],
    paths: Mapping[str, Path],
    looks: Mapping[str, Look],
) -> SplitPictures:
    own = [row for row in rows if split_of[row.image] == name]
    names = list(dict.fromkeys(row.image for row in own))
    index = {image: number for number, image in enumerate(names)}
    return SplitPictures(
        name,
        names,
        [paths[image] for image in names],
        [looks[image] for image in names],
        [row.caption for row in own],
        [index[row.image] for row in own],
    )


def _duplicates(splits: Sequence[SplitPictures]) -> list[str]:
    """Describe near-duplicates in two splits."""
    return [
        f"{right.paths[b]} of {right.name} looks like {left.paths[a]} of {left.name}"
        for number, left in enumerate(splits)
        for right in splits[number + 1 :]
        for a, b in near_duplicates(left.looks, right.looks)
    ]
