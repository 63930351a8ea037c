"""Find all problems of one split of a data folder.

Inside: `SplitCheck`, `SplitSummary`, `Problem`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs
import numpy as np

from itm_fast.data import layout
from itm_fast.data.boxes import RULE, are_boxes, open_boxes
from itm_fast.data.tokenization import tokenize
from itm_fast.data.vocabulary import Vocabulary
from itm_fast.files import regular

__all__ = ["MAX_PLACES", "Problem", "SplitCheck", "SplitSummary", "without_path"]

MAX_PLACES = 10
BLOCK_BYTES = 16 * 2**20


@attrs.frozen
class Problem:
    """A problem of a file: what, how often, and the first `MAX_PLACES` places (lines from 1, rows from 0)."""

    file: str
    what: str
    count: int = 1
    places: tuple[str, ...] = ()


@attrs.frozen
class SplitSummary:
    """The content of a split; None for values that a problem hides. `words` are quantiles of the words per caption."""

    split: str
    images: int | None
    captions: int | None
    regions: int | None
    channels: int | None
    dtype: str | None
    stored_five_times: bool
    words: dict[str, float] | None
    unknown_share: float | None
    boxes: bool


class SplitCheck:
    """The check of one split. Captions are read by the constructor, features by `run`."""

    def __init__(self, folder: Path, split: str, problems: list[Problem], warnings: list[Problem]) -> None:
        self.folder, self.split, self.problems, self.warnings = folder, split, problems, warnings
        self.ids: list[str] | None = None
        self.hashes = np.empty(0, dtype=np.uint64)
        self.stride = 1
        self.unreadable: set[str] = set()
        self.captions = self._read_captions()
        self.rows = self._open_features()
        self.size = 0 if self.rows is None else self.rows.nbytes

    def _path(self, suffix: str) -> Path:
        return layout.split_path(self.folder, self.split, suffix)

    def _add(self, suffix: str, what: str, count: int = 1, places: Iterable[str] = ()) -> None:
        self.problems.append(Problem(self._path(suffix).name, what, count, tuple(itertools.islice(places, MAX_PLACES))))

    def _add_unreadable(self, suffix: str, error: ValueError | OSError) -> None:
        self.unreadable.add(suffix)
        self._add(suffix, without_path(error, self._path(suffix)))

    def _lines(self, suffix: str, parse: Callable[[bytes], object]) -> list[object] | None:
        """Parse each line of a file; a refused line becomes None.

        Returns:
            The parsed lines. None if the file is absent, or if it is unreadable; then its suffix is in `unreadable`.
        """
        path = self._path(suffix)
        try:
            if not regular.is_present(path):
                return None
            lines = layout.read_lines(path)
        except (ValueError, OSError) as error:
            self._add_unreadable(suffix, error)
            return None
        values: list[object] = []
        refused: dict[str, list[int]] = defaultdict(list)
        for number, line in enumerate(lines, 1):
            try:
                values.append(parse(line))
            except ValueError as error:
                values.append(None)
                # Text in brackets or after "got" is specific to the line.
                refused[str(error).partition(" (")[0].partition(", got ")[0]].append(number)
        for what, numbers in refused.items():
            self._add(suffix, what, len(numbers), (f"line {number}" for number in numbers))
        return values

    def _read_captions(self) -> list[str | None] | None:
        captions = self._lines("caps.txt", layout.caption_in)
        if captions is None and "caps.txt" not in self.unreadable:
            self._add("caps.txt", "no such file")
        elif captions == []:
            self._add("caps.txt", "expected at least one caption, the file is empty")
        return captions  # type: ignore[return-value]

    def _open_features(self) -> np.memmap | None:
        path = self._path("ims.npy")
        try:
            if regular.is_present(path):
                return layout.open_features(path)
            self._add("ims.npy", "no such file")
        except (ValueError, OSError) as error:
            self._add_unreadable("ims.npy", error)
        return None

    def run(self, vocabulary: Vocabulary | None, advance: Callable[[int], object]) -> SplitSummary:
        """Check the features and the files that describe them."""
        words, unknown_share = self._words(vocabulary)
        rows, captions = self.rows, self.captions
        stride, caption_image = 1, None
        if rows is not None and captions:
            stride, caption_image = self._match(rows, len(captions))
        self.stride = stride
        if rows is not None:
            counts = self._region_counts(len(rows), rows.shape[1])
            self._scan(rows.shape, rows.itemsize, stride, counts, advance)
            self._check_boxes(counts, rows.shape[1])
        if rows is not None:
            n_images = len(rows) // stride
            if caption_image is not None:
                without = np.setdiff1d(np.arange(n_images), caption_image)
                if len(without):
                    self._add("ims.npy", "images without captions", len(without), (f"row {row}" for row in without))
            self._check_ids(n_images, stride, caption_image, len(captions or ()))
            self._check_tags(n_images, stride)
        return SplitSummary(
            split=self.split,
            images=None if rows is None else len(rows) // stride,
            captions=None if captions is None else len(captions),
            regions=None if rows is None else int(rows.shape[1]),
            channels=None if rows is None else int(rows.shape[2]),
            dtype=None if rows is None else str(rows.dtype),
            stored_five_times=stride > 1,
            words=words,
            unknown_share=unknown_share,
            boxes=self._path("boxes.npy").is_file(),
        )

    @property
    def has_counts(self) -> bool:
        """Return whether the regions of each image are counted."""
        return self._path("regions.txt").is_file()

    def _words(self, vocabulary: Vocabulary | None) -> tuple[dict[str, float] | None, float | None]:
        """Return quantiles of the words per caption, and the share of words that the vocabulary lacks."""
        lengths, known, unknown = [], 0, 0
        for caption in self.captions or ():
            if caption is not None:
                lengths.append(len(tokenize(caption)))
                if vocabulary is not None:
                    # BERT divides most words that it does not know into pieces.
                    ids = vocabulary.encode(caption)[vocabulary.inner]
                    missing = ids.count(vocabulary.unk)
                    known, unknown = known + len(ids) - missing, unknown + missing
        if not lengths:
            return None, None
        smallest, median, high, largest = np.quantile(lengths, [0, 0.5, 0.95, 1])
        words = {"min": smallest, "median": median, "mean": np.mean(lengths), "p95": high, "max": largest}
        share = None if vocabulary is None else unknown / max(known + unknown, 1)
        return {name: round(float(value), 2) for name, value in words.items()}, share

    def _match(self, rows: np.memmap, n_captions: int) -> tuple[int, np.ndarray | None]:
        """Return how often each image is stored, and the image of each caption (None if a problem hides it)."""
        suffix = "cap2im.txt"
        owners = self._lines(suffix, lambda line: layout.image_row_in(line, len(rows)))
        if suffix in self.unreadable:
            return 1, None
        if owners is not None:
            if len(owners) != n_captions:
                self._add(suffix, f"expected one line per caption ({n_captions}), got {len(owners)} lines")
            if len(owners) != n_captions or None in owners:
                return 1, None
            return 1, np.array(owners, dtype=np.int64)
        try:
            stride = layout.match_counts(self.folder, self.split, rows, n_captions)
        except ValueError as error:
            suffix = "ims.npy" if str(error).startswith(str(self._path("ims.npy"))) else "caps.txt"
            self._add(suffix, without_path(error, self._path(suffix)))
            return 1, None
        return stride, np.arange(n_captions) // layout.CAPTIONS_PER_IMAGE

    def _region_counts(self, n_rows: int, most: int) -> np.ndarray:
        """Return the regions of each row, (n_rows,); `most` for rows without a valid count."""
        suffix = "regions.txt"
        counts = self._lines(suffix, lambda line: layout.region_count_in(line, most))
        if counts is not None and len(counts) != n_rows:
            self._add(suffix, f"expected one line per row of the features ({n_rows}), got {len(counts)} lines")
            counts = None
        if counts is None:
            return np.full(n_rows, most)
        return np.array([most if count is None else count for count in counts])

    def _scan(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        stride: int,
        counts: np.ndarray,
        advance: Callable[[int], object],
    ) -> None:
        """Check every value, one block of rows at a time."""
        row_bytes = itemsize * shape[1] * shape[2]
        block = max(BLOCK_BYTES // row_bytes // stride, 1) * stride
        hashes: list[int] = []
        not_finite: list[int] = []
        different: list[int] = []
        zeros: list[tuple[int, int]] = []
        for start in range(0, shape[0], block):
            # A new map for each block: the pages of a lasting map would count as memory of this process.
            rows = layout.open_features(self._path("ims.npy"))[start : start + block]
            there = np.arange(shape[1]) < counts[start : start + block, None]
            # A signalling NaN would otherwise add a warning of NumPy to the report.
            with np.errstate(over="ignore", invalid="ignore"):
                finite = np.isfinite(rows.astype(np.float32)).all(axis=2)
                zero = ~rows.any(axis=2)
            not_finite += (start + np.flatnonzero((there & ~finite).any(axis=1))).tolist()
            padded = (there & zero).sum(axis=1)
            zeros += [(start + row, padded[row]) for row in np.flatnonzero(padded).tolist()]
            if stride > 1:
                groups = rows.reshape(-1, stride, *shape[1:])
                same = ((groups == groups[:, :1]) | (np.isnan(groups) & np.isnan(groups[:, :1]))).all(axis=(1, 2, 3))
                different += (start + stride * np.flatnonzero(~same)).tolist()
            hashes += map(_hash, rows[::stride])
            advance(len(rows) * row_bytes)
        self.hashes = np.array(hashes, dtype=np.uint64)
        if not_finite:
            what = "values that are not finite in float32"
            self._add("ims.npy", what, len(not_finite), (f"row {row}" for row in not_finite))
        if zeros:
            what = f"regions of zeros; {layout.zeros_advice(self.split)}"
            places = [f"row {row} ({count} of {counts[row]} regions)" for row, count in zeros[:MAX_PLACES]]
            self.warnings.append(Problem(self._path("ims.npy").name, what, len(zeros), tuple(places)))
        if different:
            what = f"as many rows as captions ({shape[0]}), but not each image repeated five times"
            self._add("ims.npy", what, len(different), (f"rows {row} to {row + stride - 1}" for row in different))

    def _check_boxes(self, counts: np.ndarray, most: int) -> None:
        """Check the boxes of the regions, one block of rows at a time."""
        path = self._path("boxes.npy")
        places: list[str] = []
        count = 0
        try:
            if not regular.is_present(path):
                return
            block = max(BLOCK_BYTES // (32 * most), 1)
            for start in range(0, len(counts), block):
                with np.errstate(over="ignore", invalid="ignore"):
                    rows = open_boxes(path, len(counts), most)[start : start + block].astype(np.float32)
                there = np.arange(most) < counts[start : start + block, None]
                wrong = np.argwhere(there & ~are_boxes(rows)).tolist()
                count += len(wrong)
                more = MAX_PLACES - len(places)
                places += [f"row {start + row}, region {region}" for row, region in wrong[:more]]
        except (ValueError, OSError) as error:
            self._add_unreadable("boxes.npy", error)
        if count:
            self._add("boxes.npy", f"boxes (x0, y0, x1, y1) that break {RULE}", count, places)

    def row(self, image: int) -> int:
        """Return the row of an image in the file."""
        return image * self.stride

    def digest(self, image: int) -> bytes:
        """Return a digest of an image's features."""
        return b"" if self.rows is None else hashlib.blake2b(self.rows[self.row(image)].tobytes()).digest()

    def _check_tags(self, n_images: int, stride: int) -> None:
        tags = self._lines("tags.txt", layout.tags_in)
        if tags is not None and len(tags) not in (n_images, n_images * stride):
            self._add("tags.txt", f"expected one line per image ({n_images}), got {len(tags)} lines")

    def _check_ids(self, n_images: int, stride: int, caption_image: np.ndarray | None, n_captions: int) -> None:
        known = caption_image is not None
        if caption_image is None:
            caption_image = np.zeros(n_captions, dtype=np.int64)
        path = self._path("ids.txt")
        if self._lines("ids.txt", layout.text_in) is None:
            return
        try:
            ids = layout.read_ids(path, n_images, stride, caption_image)
        except ValueError as error:
            if "line " not in (problem := without_path(error, path)):
                self._add("ids.txt", problem)
            return
        # Names of captions and row numbers do not identify images.
        if ids is None or ids == [str(row) for row in range(n_images)]:
            return
        repeated = [name for name, count in Counter(ids).items() if count > 1]
        if repeated and known:
            self._add("ids.txt", "ids of more than one image", len(repeated), repeated)
        self.ids = ids


def _hash(image: np.ndarray) -> int:
    """Return a 64-bit hash of an image's first and last region, to find images that may be equal."""
    content = image[0].tobytes() + image[-1].tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def without_path(error: ValueError | OSError, path: Path) -> str:
    """Return the message of an error without the path that it begins with."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error).removeprefix(f"{path}: ")
