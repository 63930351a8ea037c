"""Detect the regions of all splits of an import in the folder of its store, before they are packed.

Inside: `detected_splits`, `remove_detections`, `source_digest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from itm_fast.data import store_format
from itm_fast.data.detections import DetectedPictures, Detector, detect
from itm_fast.data.digests import sha256_of_parts
from itm_fast.data.pack_notes import check_empty
from itm_fast.data.picture_folder import SplitPictures
from itm_fast.data.store_format import DETECTIONS, DTYPES, UNFINISHED
from itm_fast.files import atomic, lock, regular

__all__ = ["detected_splits", "remove_detections", "source_digest"]


def source_digest(digest: str, pictures: SplitPictures) -> str:
    """Return the digest of the features of a split, from that of their encoder."""
    return sha256_of_parts(digest.encode(), *(look.digest for look in pictures.looks))


def detected_splits(
    splits: Sequence[SplitPictures], detector: Detector, out: Path, dtype: str, workers: int, progress: bool
) -> list[DetectedPictures]:
    """Return the regions of all splits: detected now or by an interrupted call, or those of a finished store.

    Args:
        splits: the pictures.
        detector, workers: as in `detect`.
        out: the folder of the store.
        dtype: the stored type.
        progress: show a progress bar on a terminal.

    Raises:
        ValueError, OSError: as `detect`; `out` contains other files, or another process writes there.
    """
    if store_format.is_store(out):
        return [_of_store(split, detector, out, dtype) for split in splits]
    folder = out / DETECTIONS
    if not folder.is_dir():
        if regular.is_present(out / UNFINISHED):
            raise ValueError(
                f"{out}: contains an unfinished store of other data or settings; remove it or choose another --out"
            )
        check_empty(out)
    with (
        lock.hold(
            out / store_format.LOCK,
            refusal=lambda holder: f"{out}: {holder} is writing there; wait until it ends or choose another --out",
            warning=lambda said: f"{out}: its file system has no locks ({said}); do not start a second import there",
            temporary=True,
        ),
        tqdm(
            total=sum(len(split.paths) for split in splits), unit=" pictures", desc="detect",
            disable=None if progress else True,
        ) as bar,
    ):  # fmt: skip
        return [detect(split, detector, folder, dtype, workers, bar.update) for split in splits]


def _of_store(pictures: SplitPictures, detector: Detector, store: Path, dtype: str) -> DetectedPictures:
    """Return the counts and boxes in a finished store, if it is of these pictures. Packing refuses another one."""
    record = store_format.read_manifest(store).split(pictures.name)
    counts = np.full(len(pictures.paths), detector.regions)
    boxes = np.zeros((int(counts.sum()), 4), dtype=np.float32)
    if record is not None and record.features == source_digest(detector.digest, pictures):
        index = store_format.read_index(store / record.index, record)
        counts, boxes = index.get("region_counts", counts), index.get("boxes", boxes)
    return DetectedPictures(
        [], counts, boxes.copy(), regions=detector.regions, width=detector.width, dtype=DTYPES[dtype],
        digest=detector.digest,
    )  # fmt: skip


def remove_detections(out: Path) -> None:
    """Remove the files that `detected_splits` wrote, once they are packed."""
    folder = out / DETECTIONS
    if folder.is_dir():
        atomic.remove_matching(folder / "*.safetensors", out)
        folder.rmdir()
