"""Read the files that name the positives of COCO's captions: ECCV Caption, Crisscrossed Captions, plausible matches.

Inside: `Ids`, `read_ids`, `Positives`, `read_positives`, `read_ratings`, `rated_positives`, `Ratings`,
`OtherSplitError`.

Files are read where the user has them; nothing is downloaded. They name images and captions by their numbers in COCO.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from itm_fast.files.arrays import open_array
from itm_fast.files.documents import read_json, read_text
from itm_fast.files.messages import shown

__all__ = [
    "Ids",
    "OtherSplitError",
    "Positives",
    "Ratings",
    "rated_positives",
    "read_ids",
    "read_positives",
    "read_ratings",
]

Counts = npt.NDArray[np.int64]

# The plausible matches of ECCV Caption have 140 MB.
_MAX_BYTES = 2**30
_REPEATS = 5
# A pair with at least this mean rating is a positive. Source: Parekh et al., Crisscrossed Captions, section 3.
_POSITIVE = 3.0
# 391895, COCO_val2014_000000391895.jpg or COCO_val2014:sentid:770337
_ID = re.compile(r"(?:.*[_:/])?0*([0-9]{1,18})(?:\.[A-Za-z]{1,5})?")


def read_ids(path: Path, n: int, what: str) -> Counts:
    """Read the COCO number of each image or caption, one per line or as `.npy`.

    Args:
        path: the file. Each number may stand five times in a row, as in `testall_ids.txt` of published features.
        n: number of images or captions.
        what: "images" or "captions", for messages.

    Returns:
        `(n,)`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it does not hold `n` different numbers.
    """
    if path.suffix.lower() == ".npy":
        array = np.asarray(open_array(path))
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise ValueError(f"{path}: expected whole numbers (n,), found {array.dtype} of shape {array.shape}")
        ids = array.astype(np.int64)
    else:
        lines = read_text(path, _MAX_BYTES, "utf-8-sig").split()
        ids = np.array([_number(line, f"{path}: line {place}") for place, line in enumerate(lines, 1)], dtype=np.int64)
    if len(ids) == n * _REPEATS and np.array_equal(ids, np.repeat(ids[::_REPEATS], _REPEATS)):
        ids = ids[::_REPEATS]
    if len(ids) != n:
        raise ValueError(
            f"{path}: expected one number per line for {n:,} {what}, found {len(ids):,}: of another split?"
        )
    found, counts = np.unique(ids, return_counts=True)
    if len(found) != n:
        raise ValueError(
            f"{path}: expected different numbers for {n:,} {what}, found {found[counts > 1][0]} "
            f"{counts[counts > 1][0]} times"
        )
    return ids


@attrs.frozen(eq=False)
class Ids:
    """The COCO number of each image and of each caption of a score matrix."""

    images: Counts
    captions: Counts


@attrs.frozen(eq=False)
class Positives:
    """The positives of queries, as indices into the score matrix.

    Attributes:
        queries: indices of the queries, `(q,)`.
        items: indices of the positives of each query.
        missing: how many positives of each query the score matrix lacks, `(q,)`. They count as not found.
    """

    queries: Counts
    items: list[Counts]
    missing: Counts


def read_positives(folder: Path, kind: str, ids: Ids) -> tuple[Positives, Positives]:
    """Read `{kind}_image_to_caption.json` and `{kind}_caption_to_image.json`, as the package eccv_caption has them.

    Each file maps the number of a query to a list of numbers.

    Args:
        folder: contains both files.
        kind: "eccv", "cxc" or "pm".
        ids: the numbers of the images and captions of the scores.

    Returns:
        The positives of images as queries, and of captions.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged, or names a query that the scores lack.
    """
    images, captions = _places(ids.images), _places(ids.captions)
    found = []
    for name, queries, items in (
        (f"{kind}_image_to_caption.json", images, captions),
        (f"{kind}_caption_to_image.json", captions, images),
    ):
        path = folder / name
        content = read_json(path, _MAX_BYTES, "a JSON object of lists of numbers")
        if not isinstance(content, dict) or not all(isinstance(value, list) for value in content.values()):
            raise ValueError(f"{path}: expected an object with a list of numbers for each number")
        table = {
            _number(query, str(path)): {_number(item, f"{path}: {shown(query)}") for item in listed}
            for query, listed in content.items()
        }
        found.append(_positives(path, table, queries, items))
    return found[0], found[1]


@attrs.frozen(eq=False)
class Ratings:
    """Rated pairs: indices of the two sides and the mean rating, each `(n,)`."""

    first: Counts
    second: Counts
    ratings: npt.NDArray[np.float64]


class OtherSplitError(ValueError):
    """Ratings name an image or caption that the scores lack."""


def read_ratings(path: Path, first: Counts, second: Counts) -> Ratings:
    """Read a file of Crisscrossed Captions, such as `sits_test.csv`: two numbers, the mean rating, the sampling method.

    Args:
        path: the file, with a line of titles.
        first: the COCO numbers of the images or captions of the scores that the first column names.
        second: those of the second column.

    Raises:
        OSError: the file cannot be read.
        OtherSplitError: the file names an image or caption that the scores lack.
        ValueError: the file is damaged.
    """
    lines = csv.reader(io.StringIO(read_text(path, _MAX_BYTES, "utf-8-sig"), newline=""), strict=True)
    try:
        titles = next(lines, [])
        rows = [(lines.line_num, row) for row in lines]
    except csv.Error as error:
        raise ValueError(f"{path}: line {lines.line_num}: {error}") from None
    if len(titles) < 3 or titles[2] != "agg_score":
        raise ValueError(f"{path}: expected a third column agg_score, found {shown(titles)}")
    sides: tuple[list[int], list[int]] = ([], [])
    ratings = []
    known = _places(first), _places(second)
    for place, row in rows:
        where = f"{path}: line {place}"
        if len(row) < 3:
            raise ValueError(f"{where}: expected two numbers and a rating, found {shown(row)}")
        for side, places, text in zip(sides, known, row, strict=False):
            number = _number(text, where)
            if number not in places:
                raise OtherSplitError(
                    f"{where}: {shown(text)} is not among the numbers of the scores: ratings of another split?"
                )
            side.append(places[number])
        try:
            ratings.append(float(row[2]))
        except ValueError:
            raise ValueError(f"{where}: expected a rating, found {shown(row[2])}") from None
    if not ratings:
        raise ValueError(f"{path}: expected rated pairs, found only titles")
    return Ratings(np.array(sides[0]), np.array(sides[1]), np.array(ratings))


def rated_positives(ratings: Ratings) -> tuple[Positives, Positives]:
    """Return the pairs of a caption (first) and an image (second) with a rating of at least 3 as positives.

    Returns:
        The positives of images as queries, and of captions. An image or caption without any is no query.
    """
    right = ratings.ratings >= _POSITIVE
    if not right.any():
        raise ValueError(f"ratings: expected pairs of a caption and an image rated at least {_POSITIVE:g}, found none")
    captions, images = ratings.first[right], ratings.second[right]
    return _grouped(images, captions), _grouped(captions, images)


def _grouped(queries: Counts, items: Counts) -> Positives:
    table: dict[int, set[int]] = {}
    for query, item in zip(queries.tolist(), items.tolist(), strict=True):
        table.setdefault(query, set()).add(item)
    chosen = sorted(table)
    return Positives(
        np.array(chosen, dtype=np.int64),
        [np.array(sorted(table[query]), dtype=np.int64) for query in chosen],
        np.zeros(len(chosen), dtype=np.int64),
    )


def _positives(
    path: Path, table: Mapping[int, set[int]], queries: Mapping[int, int], items: Mapping[int, int]
) -> Positives:
    if not table or not all(table.values()):
        raise ValueError(f"{path}: expected queries with at least one positive each")
    lost = [query for query in table if query not in queries]
    if lost:
        raise ValueError(
            f"{path}: {len(lost):,} of {len(table):,} queries are not among the numbers of the scores, the first is "
            f"{lost[0]}: scores of another split, or images and captions exchanged?"
        )
    ordered = sorted((queries[query], listed) for query, listed in table.items())
    known = [np.array(sorted(items[item] for item in listed if item in items), dtype=np.int64) for _, listed in ordered]
    return Positives(
        np.array([query for query, _ in ordered], dtype=np.int64),
        known,
        np.array([len(listed) - len(found) for (_, listed), found in zip(ordered, known, strict=True)], dtype=np.int64),
    )


def _places(ids: Counts) -> dict[int, int]:
    return {number: place for place, number in enumerate(ids.tolist())}


def _number(text: object, where: str) -> int:
    found = _ID.fullmatch(str(text)) if isinstance(text, str | int) and not isinstance(text, bool) else None
    if found is None:
        raise ValueError(f"{where}: expected the number of an image or caption, found {shown(text)}")
    return int(found[1])
