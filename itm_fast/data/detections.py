"""Regions that a detector finds in pictures. They are kept in files until all are known and can be packed.

Inside: `Detection`, `Detector`, `DetectedPictures`, `detect`.

FOLDER/{split}-00000.safetensors holds the regions of consecutive pictures: "features" (N, f), "boxes" (N, 4) and
"counts" (n,). "source" is the digest of what they were computed from, "content" that of the numbers. Detection that was
interrupted continues behind the last file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from itm_fast.data.digests import sha256_of_parts
from itm_fast.data.features import Features, as_regions
from itm_fast.data.picture_folder import SplitPictures
from itm_fast.data.picture_sources import Decoded
from itm_fast.data.preprocessing import Shrinking
from itm_fast.data.store_format import DTYPES
from itm_fast.files import atomic, regular
from itm_fast.fragments import Fragments

__all__ = ["DetectedPictures", "Detection", "Detector", "detect"]

# An interruption loses the work on that many pictures.
_PICTURES = 16


@attrs.frozen(eq=False)
class Detection:
    """The regions of a picture: features (k, f) float32, and boxes (k, 4) float32 as shares of the picture's sides."""

    features: Tensor
    boxes: Tensor


class Detector(Protocol):
    """What finds at least one and at most `regions` regions in a picture, pixels (height, width, 3) uint8."""

    @property
    def preprocessing(self) -> Shrinking: ...

    @property
    def regions(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def digest(self) -> str: ...

    def __call__(self, pixels: np.ndarray) -> Detection: ...


class DetectedPictures(Features):
    """Features of detected regions, in files that `detect` wrote.

    Args:
        files: the files.
        counts: (n,) int64, the regions of each picture.
        boxes: (N, 4) float32, the boxes of all regions end to end.
        regions, width: the maximum number of regions per picture, and numbers per region.
        dtype: the type of the numbers.
        digest: identifies the detector.
    """

    in_process = False

    def __init__(
        self,
        files: Sequence[Path],
        counts: np.ndarray,
        boxes: np.ndarray,
        *,
        regions: int,
        width: int,
        dtype: torch.dtype,
        digest: str,
    ) -> None:
        self.shape, self.dtype, self.digest, self.boxes = (len(counts), regions, width), dtype, digest, boxes
        self.counts = None if bool((counts == regions).all()) else counts
        self._files, self._counts = files, counts
        self._opened: tuple[int, Tensor] = -1, torch.empty(0)

    def gather(self, images: np.ndarray) -> Tensor | Fragments:
        """Read the regions of pictures in any order; slow for many."""
        rows = torch.cat([self.stored(image, image + 1) for image in images.tolist()]).to(torch.float32)
        return as_regions(rows, None if self.counts is None else self.counts[images], self.shape, len(images))

    def stored(self, first: int, last: int) -> Tensor:
        parts = []
        for number in range(first // _PICTURES, (last - 1) // _PICTURES + 1):
            if self._opened[0] != number:
                self._opened = number, _read(self._files[number])["features"]
            start = number * _PICTURES
            ends = np.concatenate([[0], np.cumsum(self._counts[start : start + _PICTURES])])
            chosen = slice(ends[max(first - start, 0)], ends[min(last - start, _PICTURES)])
            parts.append(self._opened[1][chosen])
        return torch.cat(parts)


def detect(
    pictures: SplitPictures,
    detector: Detector,
    folder: Path,
    dtype: str,
    workers: int,
    advance: Callable[[int], object],
) -> DetectedPictures:
    """Find the regions of all pictures of a split, one picture at a time, and keep them in files.

    Args:
        pictures: the pictures.
        detector: finds the regions.
        folder: the folder of the files, in that of the store. Files that an earlier call wrote are not written again.
        dtype: the type of the numbers: "bf16", "fp16" or "fp32".
        workers: processes that decode; 0: this process.
        advance: called with the number of pictures that are done.

    Raises:
        ValueError: a picture cannot be decoded or has changed, a number is beyond the range of `dtype`, or a file is
            damaged or belongs to other pictures or settings. The message names the file.
        OSError: the disk is full.
    """
    pixels = Decoded(pictures, detector.preprocessing.picture, workers)
    files, counts, boxes = [], [], []
    for first in range(0, len(pictures.paths), _PICTURES):
        last = min(first + _PICTURES, len(pictures.paths))
        path = folder / f"{pictures.name}-{first // _PICTURES:05d}.safetensors"
        digests = [look.digest for look in pictures.looks[first:last]]
        source = bytes.fromhex(sha256_of_parts(detector.digest.encode(), dtype.encode(), *digests))
        if regular.is_present(path):
            found = _read(path)
            advance(last - first)
        else:
            detections = []
            for picture, array in zip(pictures.paths[first:last], pixels.take(first, last), strict=True):
                detections.append(_checked(detector(array), picture, dtype))
                advance(1)
            found = _write(path, detections, source, folder.parent)
        if found["source"].numpy().tobytes() != source:
            raise ValueError(
                f"{folder.parent}: contains an unfinished store of other data or settings; remove it or choose another "
                "--out"
            )
        files.append(path)
        counts.append(found["counts"].numpy())
        boxes.append(found["boxes"].numpy())
    return DetectedPictures(
        files, np.concatenate(counts), np.concatenate(boxes), regions=detector.regions, width=detector.width,
        dtype=DTYPES[dtype], digest=detector.digest,
    )  # fmt: skip


def _checked(found: Detection, path: Path, dtype: str) -> Detection:
    """Return a detection with the features in the stored type."""
    if not bool(found.features.isfinite().all()):
        raise ValueError(f"{path}: the detector returns values that are not finite")
    features = found.features.to(DTYPES[dtype])
    if not bool(features.isfinite().all()):
        raise ValueError(f"{path}: the detector returns values beyond the range of {dtype}")
    return Detection(features, found.boxes)


def _write(path: Path, detections: Sequence[Detection], source: bytes, root: Path) -> dict[str, Tensor]:
    content = {
        "features": torch.cat([one.features for one in detections]),
        "boxes": torch.cat([one.boxes for one in detections]),
        "counts": torch.tensor([len(one.boxes) for one in detections]),
        "source": torch.frombuffer(bytearray(source), dtype=torch.uint8),
    }
    content["content"] = _digest(content)
    atomic.remove_temporaries(path, root)
    atomic.write_bytes(path, save_tensors(content), root)
    return content


def _read(path: Path) -> dict[str, Tensor]:
    try:
        content: dict[str, Tensor] = load_tensors(regular.read_bytes(path))
        whole = torch.equal(content.pop("content"), _digest(content))
    except (SafetensorError, KeyError):
        whole = False
    if not whole:
        raise ValueError(f"{path}: damaged; remove this file and run the command again")
    return content


def _digest(content: dict[str, Tensor]) -> Tensor:
    names = ("features", "boxes", "counts", "source")
    parts = [content[name].contiguous().view(torch.uint8).numpy().tobytes() for name in names]
    return torch.frombuffer(bytearray.fromhex(sha256_of_parts(*parts)), dtype=torch.uint8)
