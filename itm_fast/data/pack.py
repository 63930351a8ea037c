"""Pack a folder in the published layout into a feature store, in bounded memory. Interrupted packing can continue.

Inside: `pack`, `pack_splits`, `check_target`, `state_of`, `SHARD_BYTES`.

Shards are written one by one under a temporary name, flushed and renamed. `unfinished.json` then records each
(`pack_notes`), so a later call with the same source and settings continues after the last recorded shard. The manifest
is written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save as save_tensors
from tqdm import tqdm

from itm_fast.data import layout, store_format
from itm_fast.data.detections import DetectedPictures
from itm_fast.data.digests import sha256_of_file
from itm_fast.data.features import BLOCK_BYTES
from itm_fast.data.pack_notes import Notes, check_empty
from itm_fast.data.pack_plan import check_shards, check_widths, ranges, sizes
from itm_fast.data.picture_shards import write_shard as write_picture_shard
from itm_fast.data.picture_sources import ResizedPictures
from itm_fast.data.precomputed import PrecomputedDataset
from itm_fast.data.store_format import DTYPES, Manifest, ShardRecord, SplitRecord, shard_header
from itm_fast.data.vocabulary import Vocabulary, find_vocabulary, load_vocabulary
from itm_fast.files import atomic, documents, lock, regular
from itm_fast.files.messages import printable

__all__ = ["SHARD_BYTES", "check_target", "pack", "pack_splits", "state_of"]

SHARD_BYTES = 256 * 2**20

# For each file of a split, its size, modification time and inode; None for an absent file.
States = dict[Path, tuple[int, int, int] | None]
# Of a file whose content has been read.
_STEADY = (0, 0, 0)


def pack(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str = "bf16",
    splits: Sequence[str] = (),
    vocabulary_file: str | os.PathLike[str] | None = None,
    min_count: int = 4,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> Manifest:
    """Write a feature store from a folder in the published layout.

    If `out` contains an unfinished store of the same source and settings, packing continues after comparing its shards
    with their checksums. A finished store is left unchanged.

    Args:
        directory: the folder.
        out: the folder of the store.
        dtype: the stored type: "bf16", "fp16" or "fp32". Numbers are rounded to the nearest, float64 to float32 first.
        splits: the splits to pack; default: all.
        vocabulary_file: the vocabulary of the token ids; None: the one that `load_vocabulary` finds.
        min_count: minimum occurrences of a word, if the vocabulary is built from the captions.
        shard_bytes: approximate size of a shard, which contains at least one image.
        progress: show a progress bar on a terminal.

    Raises:
        ValueError: the folder cannot be read, a value is not finite in `dtype` (the message names file and row), `out`
            contains other files or a finished store with a damaged file, the source changes during packing, or another
            process packs into `out`.
        OSError: the disk is full. The next call continues from the recorded shards.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes: expected at least 1, got {shard_bytes}")
    source, target = Path(directory), Path(out)
    layout.check_directory(source)
    if store_format.is_store(source):
        raise ValueError(f"{source}: is a feature store already; expected a folder in the published layout")
    if target.resolve() == source.resolve():
        raise ValueError(f"out: expected another folder than that of the data, got {target}")
    check_target(target)
    names = list(dict.fromkeys(splits)) or layout.available_splits(source)
    if not names:
        raise ValueError(f"{source}: no split: expected files such as train_ims.npy and train_caps.txt")
    for name in names:
        if name.encode("utf-8", "replace").decode() != name:
            raise ValueError(f"{source}: split {name!r}: expected a name in UTF-8; rename its files")
    # Taken before anything is read, so that every later change is noticed.
    states = {name: _states_of(source, name) for name in names}
    vocabulary = load_vocabulary(source, vocabulary_file, min_count=min_count)
    datasets = [PrecomputedDataset(source, name, vocabulary) for name in names]
    if vocabulary_file is None and find_vocabulary(source) is None:
        for data in datasets:
            if data.split == "train":
                data.warn_of_rare_words(min_count)
    return pack_splits(datasets, states, target, dtype, vocabulary, shard_bytes, progress=progress)


def check_target(target: Path) -> None:
    """Raise ValueError if a store cannot be written to `target`. Call it before long work."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target}: expected a folder for the store, found a file")
    atomic.check_folder(target, target)
    atomic.check_entries(target, [store_format.MANIFEST, store_format.UNFINISHED, store_format.VOCABULARY])
    if not regular.is_present(target / store_format.UNFINISHED) and not store_format.is_store(target):
        # Detected regions may remain of an interrupted import; packing checks whether it can use them.
        check_empty(target, store_format.DETECTIONS)


def pack_splits(
    datasets: Sequence[PrecomputedDataset],
    states: Mapping[str, States],
    target: Path,
    dtype: str,
    vocabulary: Vocabulary,
    shard_bytes: int,
    *,
    progress: bool = False,
) -> Manifest:
    """Write a feature store from opened splits; see `pack`.

    Args:
        datasets: the splits.
        states: for each split, the states of its files before it was opened, by `state_of`. A file that changes during
            packing is an error.
        target: the folder of the store.
        dtype, shard_bytes, progress: as in `pack`.
        vocabulary: of the token ids.

    Raises:
        ValueError, OSError: as `pack`.
    """
    check_widths(datasets)
    check_shards(datasets, dtype, shard_bytes)
    with lock.hold(
        target / store_format.LOCK,
        refusal=lambda holder: f"{target}: {holder} is packing there; wait until it ends or choose another --out",
        warning=lambda said: f"{target}: its file system has no locks ({said}); do not start a second packing there",
        temporary=True,
    ):
        return _pack(datasets, states, target, dtype, vocabulary, shard_bytes, progress)


def _pack(
    datasets: Sequence[PrecomputedDataset],
    states: Mapping[str, States],
    target: Path,
    dtype: str,
    vocabulary: Vocabulary,
    shard_bytes: int,
    progress: bool,
) -> Manifest:
    """Pack splits. `states` are the states of their files before opening. The caller holds the folder's lock."""
    try:
        documents.check_characters(datasets[0].source.encoder)
    except ValueError:
        folder = printable(datasets[0].source.encoder).split(" ", 4)[-1]
        raise ValueError(f"encoder: {folder}: a store cannot name a path that is not UTF-8; rename it") from None
    sources = {data.split: _source_of(data) for data in datasets}
    words = store_format.vocabulary_digest(vocabulary)
    asked = {"dtype": dtype, "shard_bytes": shard_bytes, "vocabulary": words, "splits": sources}
    features = {
        data.split: (data.features_path, states[data.split].get(data.features_path, _STEADY)) for data in datasets
    }
    kept = store_format.DETECTIONS if isinstance(datasets[0].source, DetectedPictures) else None
    notes = Notes(target, asked, features, kept=kept)
    if notes.finished is not None:
        return notes.finished
    vocabulary.save(target / store_format.VOCABULARY)
    total = sum(data.source.nbytes for data in datasets)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None if progress else True) as bar:
        records = []
        for data in datasets:
            records.append(_pack_split(data, target, dtype, shard_bytes, notes, bar))
            changed = next((path for path, state in states[data.split].items() if state_of(path) != state), None)
            if changed is None and records[-1].features != sources[data.split]["features"]:
                changed = data.features_path
            if changed is not None:
                notes.discard(shard.file for shard in records[-1].shards)
                raise ValueError(f"{changed}: changed while it was packed; remove {target} and pack again")
    source = datasets[0].source
    manifest = Manifest(
        dtype=dtype, vocabulary=words, splits=tuple(records), stretched=source.stretched, encoder=source.encoder
    )
    store_format.write_manifest(target, manifest)
    notes.path.unlink(missing_ok=True)
    return manifest


def _states_of(directory: Path, split: str) -> States:
    """Return the state of each file of a split, which every write changes; None for an absent file."""
    return {path: state_of(path) for path in (layout.split_path(directory, split, name) for name in layout.SUFFIXES)}


def state_of(path: Path) -> tuple[int, int, int] | None:
    """Return size, modification time and inode of a file; None if it does not exist."""
    if not regular.is_present(path):
        return None
    state = path.stat()
    return state.st_size, state.st_mtime_ns, state.st_ino


def _source_of(data: PrecomputedDataset) -> dict[str, str]:
    """Return digests that identify the source of a split: of its features, and of the content of the index."""
    index = hashlib.sha256(_index_of(data)).hexdigest()
    return {"features": data.features_digest(), "index": index}


def _index_of(data: PrecomputedDataset) -> bytes:
    """Return the content of a split's index file."""
    arrays = {
        "token_ids": data.token_ids.numpy(),
        "caption_lengths": data.caption_lengths.numpy(),
        "caption_image": data.caption_image.numpy(),
        **_as_bytes("text", data.captions),
    }
    if data.image_ids is not None:
        arrays |= _as_bytes("ids", data.image_ids)
    if data.tags is not None:
        arrays |= _as_bytes("tags", data.tags)
    if data.source.counts is not None:
        arrays["region_counts"] = data.source.counts
    if data.box_source is not None:
        arrays["boxes"] = data.box_source.values.numpy()
    return bytes(save_tensors({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def _as_bytes(name: str, texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Return texts end to end, and their lengths in bytes."""
    encoded = [text.encode() for text in texts]
    lengths = np.array([len(text) for text in encoded], dtype=np.int64)
    return {name: np.frombuffer(b"".join(encoded), dtype=np.uint8), f"{name}_lengths": lengths}


def _pack_split(
    data: PrecomputedDataset, folder: Path, dtype: str, shard_bytes: int, notes: Notes, bar: Any
) -> SplitRecord:
    bar.set_description_str(data.split)
    shape, counts = data.source.shape, data.source.counts
    lengths = np.full(shape[0], shape[1]) if counts is None else counts
    shards = []
    for number, (first, last) in enumerate(ranges(sizes(data.source, dtype), shard_bytes)):
        name = f"{data.split}-{number:05d}.safetensors"
        regions = int(lengths[first:last].sum())
        done = notes.shards.get(name)
        if done is not None and _is_whole(folder / name, dtype, done, shape[2], last - first, regions):
            bar.update(regions * shape[2] * data.source.dtype.itemsize)
        else:
            done = _write_shard(data, folder / name, dtype, first, last, regions, bar)
            notes.add(done)
        shards.append(done)
    index = _index_of(data)
    path = folder / f"{data.split}-index.safetensors"
    atomic.remove_temporaries(path)
    atomic.write_bytes(path, index)
    return SplitRecord(
        name=data.split,
        images=shape[0],
        captions=len(data),
        regions=shape[1],
        ragged=counts is not None,
        width=shape[2],
        index=path.name,
        index_bytes=len(index),
        index_sha256=hashlib.sha256(index).hexdigest(),
        source_dtype=str(data.source.dtype).removeprefix("torch."),
        features=data.features_digest(),
        repeated=data.repeated,
        shards=tuple(shards),
    )


def _is_whole(path: Path, dtype: str, shard: ShardRecord, width: int, images: int, regions: int) -> bool:
    if (shard.images, shard.regions) != (images, regions):
        return False
    with contextlib.suppress(ValueError):
        store_format.check_shard(path, dtype, shard, width)
        return sha256_of_file(path, lambda _count: None) == shard.sha256
    return False


def _write_shard(
    data: PrecomputedDataset, path: Path, dtype: str, first: int, last: int, regions: int, bar: Any
) -> ShardRecord:
    shape = data.source.shape
    if isinstance(data.source, ResizedPictures):
        return write_picture_shard(path, data.source.files(first, last, bar.update), regions)
    step = max(BLOCK_BYTES // (shape[1] * shape[2] * data.source.dtype.itemsize), 1)
    header = shard_header(dtype, regions, shape[2])
    digest = hashlib.sha256(header)
    size = len(header)
    atomic.remove_temporaries(path)
    with atomic.atomic_file(path) as file:
        file.write(header)
        for start in range(first, last, step):
            end = min(start + step, last)
            # A new map for each block: the pages of a lasting map would count as memory of this process.
            rows = data.reopened().stored(start, end)
            converted = rows.to(DTYPES[dtype])
            _check_range(data, converted, dtype, start)
            # numpy has no bfloat16, so the numbers are written as bytes.
            content = converted.contiguous().view(torch.uint8).numpy().data
            digest.update(content)
            file.write(content)
            size += content.nbytes
            bar.update(rows.numel() * rows.element_size())
    return ShardRecord(file=path.name, images=last - first, regions=regions, bytes=size, sha256=digest.hexdigest())


def _check_range(data: PrecomputedDataset, rows: torch.Tensor, dtype: str, first: int) -> None:
    """Raise ValueError if rounding made a finite number infinite. The message names the row."""
    infinite = ~rows.isfinite().all(1)
    if not bool(infinite.any()):
        return
    region = int(infinite.nonzero()[0, 0])
    counts = data.source.counts
    if counts is None:
        image = first + region // data.source.shape[1]
    else:
        image = first + int(np.searchsorted(np.cumsum(counts[first:]), region, side="right"))
    raise ValueError(f"{data.place_of(image)} holds values beyond the range of {dtype}")
