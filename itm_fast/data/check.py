"""Find all problems of a data folder in one pass.

Inside: `check_folder`, `Report`, `SplitSummary`, `Problem`.

The readers in `layout` stop at the first bad line or row; the check applies the same rules and reports all of them.
Features are read in blocks, so a folder larger than memory can be checked.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
from tqdm import tqdm

from itm_fast.data import layout
from itm_fast.data.check_split import MAX_PLACES, Problem, SplitCheck, SplitSummary, without_path
from itm_fast.data.store_format import check_finished
from itm_fast.data.vocabulary import MAX_RARE_SHARE, MAX_UNKNOWN_SHARE, MIN_COUNT, Vocabulary, find_vocabulary
from itm_fast.files import regular

__all__ = ["Problem", "Report", "SplitSummary", "check_folder"]

_BUILT = "built from train_caps.txt"


@attrs.frozen
class Report:
    """The result of a check.

    Attributes:
        folder: the data folder.
        vocabulary: the file of the vocabulary, or how it was built; None if there is none.
        vocabulary_size: its number of words.
        splits: a summary of each split.
        problems: what training would refuse, or what makes results wrong.
        warnings: findings that may be intended.
    """

    folder: str
    vocabulary: str | None
    vocabulary_size: int | None
    splits: list[SplitSummary]
    problems: list[Problem]
    warnings: list[Problem]


def check_folder(
    directory: str | os.PathLike[str],
    splits: Sequence[str] = (),
    *,
    vocabulary_file: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Report:
    """Read a whole data folder and list its problems.

    Args:
        directory: the folder, in the published precomputed layout.
        splits: the splits to check; default: all that have features or captions.
        vocabulary_file: the vocabulary; default: the one that `find_vocabulary` finds, else one built from
            `train_caps.txt`.
        progress: show a progress bar on a terminal.

    Raises:
        ValueError: the folder or the vocabulary file does not exist, or the folder is an unfinished feature store. The
            report contains all other problems.
    """
    folder = Path(directory)
    layout.check_directory(folder)
    check_finished(folder)
    if vocabulary_file is not None and not regular.is_file(vocabulary_file):
        raise ValueError(f"{vocabulary_file}: no such vocabulary file")
    for name in splits:
        layout.check_split_name(name)
    problems: list[Problem] = []
    warnings: list[Problem] = []
    names = list(dict.fromkeys(splits)) or _splits_of(folder)
    if not names:
        problems.append(Problem("", "no split: expected files such as train_ims.npy and train_caps.txt"))
    checks = [SplitCheck(folder, name, problems, warnings) for name in names]
    source, vocabulary = _vocabulary(folder, vocabulary_file, checks, problems)
    total = sum(check.size for check in checks)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None if progress else True) as bar:
        summaries = []
        for check in checks:
            bar.set_description_str(check.split)
            summaries.append(check.run(vocabulary, bar.update))
    _check_unknown_words(summaries, source == _BUILT, problems, warnings)
    _compare_widths(summaries, {check.split for check in checks if check.has_counts}, problems)
    for left, right in itertools.combinations(checks, 2):
        # In COCO's published files the 1,000 images of test are the first of testall, on purpose.
        if {left.split, right.split} != {"test", "testall"}:
            _compare_ids(left, right, problems)
            _compare_features(left, right, problems)
    size = None if vocabulary is None else len(vocabulary)
    return Report(str(folder), source, size, summaries, problems, warnings)


def _splits_of(folder: Path) -> list[str]:
    suffixes = ("_ims.npy", "_caps.txt")
    return sorted({path.name.removesuffix(end) for end in suffixes for path in folder.glob(f"[!.]*{end}")})


def _vocabulary(
    folder: Path, given: str | os.PathLike[str] | None, checks: list[SplitCheck], problems: list[Problem]
) -> tuple[str | None, Vocabulary | None]:
    try:
        path = Path(given) if given is not None else find_vocabulary(folder)
    except ValueError as error:
        problems.append(Problem("", str(error)))
        return None, None
    if path is not None:
        try:
            return str(path), Vocabulary.from_file(path)
        except ValueError as error:
            inside = path.name if path.parent == folder else str(path)
            problems.append(Problem(inside, without_path(error, path)))
            return str(path), None
    train = next((check for check in checks if check.split == "train" and check.captions), None)
    if train is None:
        return None, None
    captions = (caption for caption in train.captions or () if caption is not None)
    return _BUILT, Vocabulary.build(captions)


def _check_unknown_words(
    summaries: list[SplitSummary], built: bool, problems: list[Problem], warnings: list[Problem]
) -> None:
    """Report a vocabulary that lacks many words: a built one leaves out rare words; a file may be of other data."""
    shares = {one.split: one.unknown_share for one in summaries if one.unknown_share is not None}
    rare = shares.get("train", 0.0) if built else 0.0
    if rare > MAX_RARE_SHARE:
        what = (
            f"the vocabulary built from it leaves out {rare:.0%} of its words, as each occurs fewer than {MIN_COUNT} "
            "times; a lower --min-count of train and data pack keeps more"
        )
        warnings.append(Problem("train_caps.txt", what))
    if rare > MAX_UNKNOWN_SHARE:
        return
    for split, share in shares.items():
        if share > MAX_UNKNOWN_SHARE:
            what = (
                f"the vocabulary lacks {share:.0%} of the words; is it that of other data, or built with a high "
                "--min-count?"
            )
            problems.append(Problem(f"{split}_caps.txt", what))


def _compare_widths(summaries: list[SplitSummary], counted: set[str], problems: list[Problem]) -> None:
    """Compare the features of the splits; those with region counts, `counted`, may have other numbers of regions."""
    shapes = [(one.split, (one.regions, one.channels)) for one in summaries if one.regions is not None]
    for split, (regions, channels) in shapes[1:]:
        first, expected = shapes[0]
        if channels != expected[1] or (regions != expected[0] and not counted & {first, split}):
            what = f"{regions} regions of {channels} channels, but {first} has {expected[0]} of {expected[1]}"
            problems.append(Problem(f"{split}_ims.npy", what))


def _compare_ids(left: SplitCheck, right: SplitCheck, problems: list[Problem]) -> None:
    """Find images of one split in another by name: a test on training images is invalid."""
    known = set(left.ids or ())
    shared = [name for name in dict.fromkeys(right.ids or ()) if name in known]
    if shared:
        what = f"images that are in {left.split}, too"
        problems.append(Problem(f"{right.split}_ids.txt", what, len(shared), tuple(shared[:MAX_PLACES])))


def _compare_features(left: SplitCheck, right: SplitCheck, problems: list[Problem]) -> None:
    """Find images of one split in another by their features, for missing or different names."""
    first: dict[bytes, int] = {}
    for image in np.flatnonzero(np.isin(left.hashes, right.hashes)).tolist():
        first.setdefault(left.digest(image), image)
    candidates = np.flatnonzero(np.isin(right.hashes, left.hashes)).tolist() if first else []
    found = ((image, first.get(right.digest(image))) for image in candidates)
    pairs = [(image, other) for image, other in found if other is not None]
    if pairs:
        what = f"images whose features are those of images of {left.split}"
        places = (f"row {right.row(image)} (row {left.row(other)} of {left.split})" for image, other in pairs)
        file = f"{right.split}_ims.npy"
        problems.append(Problem(file, what, len(pairs), tuple(itertools.islice(places, MAX_PLACES))))
