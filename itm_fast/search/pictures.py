"""Turn pictures into the features that a model was trained on, and into thumbnails.

Inside: `Picture`, `kind_of`, `check_kind`, `grid_of`, `features_of`, `scaling_of`, `features_of_squares`,
`opened`, `thumbnail`, `picture_in`.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from itm_fast.data import CaptionDataset, PrecomputedDataset, emoji, whole_picture_of
from itm_fast.data.picture_files import MOST_STRETCHED, open_picture
from itm_fast.data.picture_shards import StoredPictures, as_patches
from itm_fast.data.preprocessing import Preprocessing
from itm_fast.files.messages import shown
from itm_fast.search.encoders import encoded, is_encoder_kind, preprocessing_of

__all__ = [
    "Picture", "check_kind", "features_of", "features_of_squares", "grid_of", "kind_of", "opened", "picture_in",
    "scaling_of", "thumbnail",
]  # fmt: skip

# A path, the content of a file, pixels (height, width, 3) uint8, or a picture that Pillow has opened.
Picture = str | os.PathLike[str] | bytes | np.ndarray | Image.Image

_KIND = re.compile(r"(\d{1,4})x(\d{1,3})( stretched)?")
_THUMBNAIL = 192


def kind_of(dataset: CaptionDataset) -> str:
    """Return how a picture becomes the features of a data set.

    "emoji"; "SIDExGRID", for the patches of the centre; "SIDExGRID stretched", for those of the picture scaled to a
    square; as `encoder_kind`, if `data import` made them with a vision model; or "" if that is unknown.
    """
    if is_encoder_kind(dataset.source.encoder):
        return dataset.source.encoder
    if isinstance(dataset.source, StoredPictures):
        return f"{dataset.source.side}x{dataset.source.grid}" + " stretched" * dataset.source.stretched
    features = dataset.region_batch([0])[0]
    return "emoji" if emoji.picture_if_patches(features.numpy()) is not None else ""


def features_of(pictures: list[Picture], kind: str, device: torch.device | str = "cpu") -> Tensor:
    """Return the features (n, k, f) float32 of pictures, on the CPU.

    Args:
        pictures: the pictures.
        kind: as `kind_of` or `encoder_kind` returns it.
        device: where an encoder runs.

    Raises:
        ValueError: the index does not know how a picture becomes features, or a picture cannot be decoded.
    """
    scaling = scaling_of(kind)
    return features_of_squares([scaling.square(opened(picture)) for picture in pictures], kind, device)


def scaling_of(kind: str) -> Preprocessing:
    """Return how pictures are scaled before they become features. Raises as `features_of`."""
    return preprocessing_of(kind) if is_encoder_kind(kind) else _patches_of(kind)[0]


def features_of_squares(squares: Sequence[np.ndarray], kind: str, device: torch.device | str = "cpu") -> Tensor:
    """Return what `features_of` does, from pixels (side, side, 3) uint8 that `scaling_of(kind).square` made."""
    pixels = np.stack(squares)
    if is_encoder_kind(kind):
        return encoded(pixels, kind, device)
    return torch.from_numpy(emoji.patches(pixels)) if kind == "emoji" else as_patches(pixels, _patches_of(kind)[1])


def grid_of(kind: str) -> int | None:
    """Return the patches per side of a picture, or None if they are unknown or those of an encoder."""
    return None if not kind or is_encoder_kind(kind) else _patches_of(kind)[1]


def check_kind(kind: str) -> None:
    """Raise ValueError if `kind` is not how a picture becomes features; "" is that this is unknown."""
    found = _KIND.fullmatch(kind)
    if found is not None and int(found[2]) > 0 and int(found[1]) > 0 and int(found[1]) % int(found[2]) == 0:
        return
    if kind not in ("", "emoji") and not is_encoder_kind(kind):
        raise ValueError(
            f"preprocessing: expected emoji, or SIDExGRID with a multiple of GRID as SIDE, such as 224x14, got "
            f"{shown(kind)}"
        )


def _patches_of(kind: str) -> tuple[Preprocessing, int]:
    """Return how a picture becomes a square, and the patches per side; ValueError if that is unknown."""
    found = _KIND.fullmatch(kind)
    if kind != "emoji" and found is None:
        raise ValueError(
            "pictures: the index was built from features, and does not know how a picture becomes features; build it "
            "again with the encoder of the features, or pass features or the id of an item"
        )
    if found is None:
        return Preprocessing(emoji.SIZE), emoji.GRID
    side = int(found[1])
    return Preprocessing(side, shortest_edge=None if found[3] else side), int(found[2])


def opened(picture: Picture) -> Image.Image:
    """Decode a picture as upright RGB; ValueError names it if it cannot be decoded."""
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
            raise ValueError(f"picture: expected uint8 (height, width, 3), got {picture.dtype} {picture.shape}")
        if max(picture.shape[:2]) > MOST_STRETCHED * min(picture.shape[:2]):
            raise ValueError(
                f"picture: expected sides up to {MOST_STRETCHED} times as long as the other, got {picture.shape[:2]}"
            )
        return Image.fromarray(picture)
    if isinstance(picture, bytes | Image.Image):
        return open_picture(Path("picture"), picture)
    if not isinstance(picture, str | os.PathLike):
        raise TypeError(f"picture: expected a path, bytes, an array or a picture of Pillow, got {shown(picture)}")
    return open_picture(Path(picture))


def thumbnail(picture: Picture, kind: str = "") -> bytes:
    """Return a WebP file of a picture, scaled down to at most 192 pixels per side.

    With `kind` it shows the part that becomes features, so that regions lie where the model has them.
    """
    image = opened(picture)
    if kind:
        image = scaling_of(kind).part(image)
    image.thumbnail((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=85)
    return buffer.getvalue()


def picture_in(dataset: CaptionDataset, image: int) -> np.ndarray | None:
    """Return the pixels (height, width, 3) uint8 of an image of a data set, or None if the data hold no pictures."""
    features = dataset.region_batch([image])[0]
    pixels = emoji.picture_if_patches(features.numpy())
    if pixels is None and isinstance(dataset, PrecomputedDataset):
        pixels = whole_picture_of(dataset, image)
    return pixels
