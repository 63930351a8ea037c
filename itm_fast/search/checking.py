"""Compare the files of an index with its manifest.

Inside: `check`.
"""

from __future__ import annotations

import os
from pathlib import Path

from tqdm.auto import tqdm

from itm_fast.data.digests import sha256_of_file
from itm_fast.files.messages import shown
from itm_fast.search.manifest import FileRecord, Manifest, SegmentRecord, read_manifest
from itm_fast.search.snapshot import Snapshot

__all__ = ["check"]

_TRIES = 5


def check(path: str | os.PathLike[str], *, progress: bool = False) -> list[str]:
    """Read a whole index; return its problems, one line each. Checksums detect flipped bits.

    If the index changes meanwhile, its new state is checked.

    Args:
        path: the folder.
        progress: show a progress bar on a terminal.

    Raises:
        ValueError: the manifest is missing or damaged, without which nothing else can be checked; or the index keeps
            changing.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    for _ in range(_TRIES):
        problems = _problems(directory, manifest, progress=progress)
        before, manifest = manifest, read_manifest(directory) if problems else manifest
        # A change removes files that it replaces.
        if manifest == before:
            return problems
    raise ValueError(f"{directory}: the index changed {_TRIES} times during the check; try again later")


def _problems(directory: Path, manifest: Manifest, *, progress: bool) -> list[str]:
    """Compare the files with one state of the index."""
    records: list[FileRecord | SegmentRecord] = [*manifest.segments]
    records += [manifest.weights] if manifest.weights is not None else []
    problems = []
    total, hidden = sum(record.bytes for record in records), None if progress else True
    with tqdm(total=total, desc="check", unit="B", unit_scale=True, leave=False, disable=hidden) as bar:
        for record in records:
            file = directory / record.file
            try:
                found = sha256_of_file(file, bar.update)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                problems.append(f"{file}: cannot be read: {reason}")
                continue
            if found != record.sha256:
                problems.append(f"{file}: damaged: its content does not match its checksum")
    if problems:
        return problems
    try:
        snapshot = Snapshot(directory, manifest)
        for side in snapshot.sides.values():
            repeated = side.ids.repeated()
            if repeated is not None:
                problems.append(f"{directory}: the id {shown(repeated)} occurs twice")
    except (ValueError, OSError) as error:
        problems.append(str(error))
    return problems
