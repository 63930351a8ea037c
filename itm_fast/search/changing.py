"""Build, add, delete and compact: each takes the lock, and takes effect when the manifest is replaced.

Inside: `build`, `add`, `delete`, `compact`, `relocate`, `update`.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
from tqdm.auto import tqdm

from itm_fast.data import CaptionDataset
from itm_fast.files.messages import shown
from itm_fast.search.encoders import check_same_kind, moved, preprocessing_of
from itm_fast.search.learning import learned_pooling
from itm_fast.search.manifest import (
    POOLINGS,
    ROW_TYPES,
    SIDES,
    Manifest,
    SegmentRecord,
    check_texts,
    is_index,
    read_manifest,
)
from itm_fast.search.members import Members, Models, members_of
from itm_fast.search.pictures import check_kind, kind_of
from itm_fast.search.pooling import Pooling
from itm_fast.search.segments import write_tensors
from itm_fast.search.snapshot import Snapshot
from itm_fast.search.sources import Listed, Source, batches_of, named, size_of
from itm_fast.search.writing import Builder, check_content, check_folder, commit, compacted, locked, remove_strays

__all__ = ["add", "build", "compact", "delete", "relocate", "update"]


def _check(candidates: int, dtype: str, pooling: str, batch_size: int) -> None:
    for name, value in (("candidates", candidates), ("batch_size", batch_size)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: expected at least 1, got {shown(value)}")
    for name, choice, choices in (("dtype", dtype, ROW_TYPES), ("pooling", pooling, POOLINGS)):
        if choice not in choices:
            raise ValueError(f"{name}: expected {' or '.join(choices)}, got {shown(choice)}")


def build(
    members: Members,
    source: Source,
    path: Path,
    *,
    ids: Sequence[str] | None,
    id_prefix: str,
    captions: Sequence[str] | None,
    preprocessing: str | None,
    dtype: str,
    pooling: str | None,
    training: CaptionDataset | None,
    candidates: int,
    thumbnails: bool,
    overwrite: bool,
    skip_bad: bool,
    batch_size: int,
    progress: bool,
) -> None:
    """Write an index; arguments as in `Index.build`."""
    data = source if training is None and isinstance(source, CaptionDataset) else training
    if pooling is None:
        pooling = "mean" if data is None else "learned"
    _check(candidates, dtype, pooling, batch_size)
    check_kind(preprocessing or "")
    if pooling == "learned" and (data is None or not len(data)):
        raise ValueError("pooling: a learned pooling needs a data set with captions; mean needs none")
    check_folder(path)
    with locked(path):
        earlier = _earlier(path, overwrite=overwrite)
        if earlier is not None or not is_index(path):
            remove_strays(path, set() if earlier is None else earlier.files())
        own = kind_of(source) if isinstance(source, CaptionDataset) else ""
        if preprocessing is None:
            preprocessing = own
        check_same_kind(own, preprocessing)
        if training is not None and preprocessing:
            check_same_kind(kind_of(training), preprocessing)
        check_texts(members.checkpoints, preprocessing)
        pool, weights = Pooling([None] * len(members.models)), None
        if pooling == "learned" and data is not None:
            pool = learned_pooling(members, data, progress=progress)
            tensors = pool.tensors()
            weights = write_tensors(path, "pooling", tensors) if tensors else None
        builder = Builder(path, pool, dtype)
        listed, names = named(source, ids, id_prefix)
        if not _fill(
            builder, members, listed, names, captions, preprocessing, thumbnails, skip_bad, batch_size, progress
        ):
            raise ValueError("source: no picture can be decoded")
        for side in SIDES:
            builder.flush(side)
        manifest = Manifest(
            generation=1 if earlier is None else earlier.generation + 1,
            models=members.fingerprints,
            checkpoints=members.checkpoints,
            dtype=dtype,
            pooling="mean" if weights is None else "learned",
            weights=weights,
            pictures=preprocessing,
            candidates=candidates,
            segments=tuple(builder.records),
        )
        commit(path, manifest)


def _earlier(path: Path, *, overwrite: bool) -> Manifest | None:
    """Return the manifest of the index that a build replaces; None if there is none, or a damaged one."""
    try:
        found = read_manifest(path) if is_index(path) else None
    except ValueError:
        if not overwrite:
            raise
        # Another program may have written a file of that name.
        check_content(path)
        return None
    if found is not None and not overwrite:
        raise ValueError(f"{path}: contains an index; --overwrite replaces it")
    return found


def _fill(
    builder: Builder,
    members: Members,
    source: Listed,
    names: Sequence[str],
    captions: Sequence[str] | None,
    preprocessing: str,
    thumbnails: bool,
    skip_bad: bool,
    batch_size: int,
    progress: bool,
) -> int:
    """Encode the items of a source; return their number, without pictures that are left out with a warning."""
    skipped: list[str] = []
    batches = batches_of(
        source, names, captions=captions, pictures=preprocessing, thumbnails=thumbnails, size=batch_size,
        device=members.device, skipped=skipped if skip_bad else None, progress=progress,
    )  # fmt: skip
    added = 0
    with tqdm(total=size_of(source), desc="index", unit="item", leave=False, disable=None if progress else True) as bar:
        for batch in batches:
            if batch.features is None:
                encodings = members.encode_captions([item.captions[0] for item in batch.items])
            else:
                encodings = members.encode_images(batch.features)
            builder.add(batch.items[0].side, batch.items, batch.thumbnails, encodings)
            added += len(batch.items)
            bar.update(len(batch.items))
    for line in skipped:
        warnings.warn(f"left out: {line}", stacklevel=2)
    return added


def add(
    path: Path,
    members: Members,
    source: Source,
    *,
    ids: Sequence[str] | None,
    id_prefix: str,
    captions: Sequence[str] | None,
    encoder: str | os.PathLike[str] | None,
    thumbnails: bool,
    new_only: bool,
    skip_bad: bool,
    batch_size: int,
    progress: bool,
) -> tuple[int, int]:
    """Add items to an index; arguments and result as in `Index.add`."""
    _check(1, ROW_TYPES[0], POOLINGS[0], batch_size)
    is_folder = isinstance(source, str | os.PathLike)
    if new_only and (not is_folder or ids is not None or captions is not None):
        raise ValueError("new_only: expected a folder of pictures as source, without ids and captions")
    with _changing(path) as manifest:
        if manifest.models != members.fingerprints:
            raise ValueError(f"{path}: the index was replaced by one of another model; open it again")
        snapshot = Snapshot(path, manifest)
        kind = manifest.pictures if encoder is None else moved(manifest.pictures, encoder)
        if isinstance(source, CaptionDataset):
            check_same_kind(kind_of(source), kind)
        listed, names = named(source, ids, id_prefix)
        taken = snapshot.sides["images"].ids
        known = [name for name in names if name in taken]
        if new_only and isinstance(listed, list):
            kept = [(file, name) for file, name in zip(listed, names, strict=True) if name not in taken]
            if not kept:
                return 0, len(known)
            listed, names = [file for file, _ in kept], [name for _, name in kept]
        elif known:
            advice = ", or skip it with --new-only" if is_folder else ""
            raise ValueError(
                f"ids: {shown(known[0])} is in the index already; delete it first{advice}, or name the new ones apart "
                "with --id-prefix"
            )
        builder = Builder(path, snapshot.pooling, manifest.dtype)
        added = _fill(builder, members, listed, names, captions, kind, thumbnails, skip_bad, batch_size, progress)
        if not added:
            return 0, len(known)
        records: list[SegmentRecord] = []
        for side in SIDES:
            own = [one for one in manifest.segments if one.side == side]
            if not any(one.side == side for one in builder.records):
                own = builder.take_small(side, own, len(manifest.models))
            records += own
            builder.flush(side)
        commit(path, _changed(manifest, [*records, *builder.records]))
    return added, len(known)


def delete(path: Path, ids: Sequence[str]) -> int:
    """Delete items of an index; as `Index.delete`."""
    if isinstance(ids, str):
        raise TypeError("ids: expected a list of ids, got a text")
    with _changing(path) as manifest:
        snapshot = Snapshot(path, manifest)
        images, captions = (snapshot.sides[side] for side in SIDES)
        gone = {"images": set[int](), "captions": set[int]()}
        for name in ids:
            of_image, of_caption = images.ids.positions(name), captions.ids.positions(name)
            if not of_image and not of_caption:
                raise ValueError(f"id: the index holds no item {shown(name)}")
            gone["images"].update(of_image)
            gone["captions"].update(captions.owners.positions(name) if of_image else of_caption)
        records = []
        for side in SIDES:
            live = snapshot.sides[side].live.numpy().copy()
            live[list(gone[side])] = False
            first = 0
            for segment in snapshot.sides[side].segments:
                own = live[first : first + len(segment)]
                first += len(segment)
                if own.any():
                    records.append(segment.record.with_live(own))
        if any(gone.values()):
            commit(path, _changed(manifest, records))
        return sum(map(len, gone.values()))


def compact(path: Path) -> None:
    """Write the items that are not deleted into few segments."""
    with _changing(path) as manifest:
        records = compacted(path, manifest)
        if tuple(records) != manifest.segments:
            commit(path, _changed(manifest, records))


def relocate(path: Path, checkpoints: Models | None, encoder: str | os.PathLike[str] | None) -> None:
    """Record other places of the same models; arguments and errors as in `Index.relocate`."""
    if not checkpoints and encoder is None:
        raise ValueError("relocate: expected run directories, an encoder, or both")
    with _changing(path) as manifest:
        runs, kind = manifest.checkpoints, manifest.pictures
        if checkpoints:
            runs = members_of(path, manifest, checkpoints, "cpu").checkpoints
            if not runs:
                raise ValueError("checkpoints: expected run directories")
        if encoder is not None:
            kind = moved(kind, encoder)
            preprocessing_of(kind)
        check_texts(runs, kind)
        commit(path, _changed(attrs.evolve(manifest, checkpoints=runs, pictures=kind), manifest.segments))


def update(path: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Change settings in the manifest."""
    with _changing(path) as manifest:
        changed = change(manifest)
        _check(changed.candidates, changed.dtype, changed.pooling, 1)
        commit(path, _changed(changed, changed.segments))


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[Manifest]:
    """Hold the lock of an index, and yield its manifest. Files of killed writers are removed."""
    read_manifest(path)
    check_folder(path)
    with locked(path):
        manifest = read_manifest(path)
        remove_strays(path, manifest.files())
        yield manifest


def _changed(manifest: Manifest, records: Sequence[SegmentRecord]) -> Manifest:
    return attrs.evolve(manifest, generation=manifest.generation + 1, segments=tuple(records))
