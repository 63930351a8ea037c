"""Check before the work that what a command writes can be written and overwrites nothing that it reads.

Inside: `check_targets`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from itm_fast.files import atomic

__all__ = ["check_targets"]

# What commands write beside a model or data, and may write again.
_WRITTEN = (".html", ".json", ".pdf", ".png", ".svg")
# JSON files of runs, of pretrained parts, of feature stores and of indexes, or ends of their names.
_CONTENT = (
    "config.json", "vocab.json", "store.json", "unfinished.json", "tokenizer.json", "detector.json", "index.json",
)  # fmt: skip


def check_targets(
    written: Mapping[str, Path | None],
    read: Mapping[str, Path | Sequence[Path] | None],
    folders: Iterable[tuple[str, Path | None]] = (),
) -> None:
    """Raise ValueError if a target cannot be written, is read by the command, or is given twice.

    Args:
        written: the files to write, by option.
        read: the files that the command reads, by option.
        folders: option and path of each run directory, data folder and index that the command reads.
    """
    # In contrast to Path.resolve, realpath accepts loops of links, which the later steps report.
    files = [
        (option, file) for option, path in read.items() for file in ([path] if isinstance(path, Path) else path or ())
    ]
    given = {os.path.realpath(file): option for option, file in files}
    whole = [(option, path) for option, path in folders if path is not None]
    for option, target in written.items():
        if target is None:
            continue
        atomic.check_target(target)
        place = Path(os.path.realpath(target))
        other = given.setdefault(str(place), option)
        if other != option:
            raise ValueError(f"{option}: {target} is also given as {other}; choose another file to write")
        for of, folder in whole:
            around = Path(os.path.realpath(folder))
            is_usual = place.suffix.lower() in _WRITTEN and not place.name.endswith(_CONTENT)
            own = not is_usual or place.parent != around or of == "--ground-truth"
            if own and place.exists() and around in place.parents:
                raise ValueError(f"{option}: {target} is a file of {of} {folder}; choose another file to write")
