"""Encode pictures with a separate vision model, as `data import --encoder` does.

Inside: `EncoderError`, `encoder_kind`, `encoded`, `is_encoder_kind`, `is_loadable`, `check_same_kind`, `moved`,
`preprocessing_of`.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from itm_fast.data.preprocessing import Preprocessing
from itm_fast.files.messages import shown
from itm_fast.models.vision_folder import PictureEncoder, load_picture_encoder

__all__ = [
    "EncoderError", "check_same_kind", "encoded", "encoder_kind", "is_encoder_kind", "is_loadable", "moved",
    "preprocessing_of",
]  # fmt: skip

# Layer, pool and digest of an encoder, and its folder.
_KIND = re.compile(r"encoder (-?\d{1,4}) ([\w-]{1,20}) ([0-9a-f]{64}) (.+)", re.DOTALL)
_BATCH = 32


class EncoderError(ValueError):
    """The encoder of an index cannot be loaded, or is another one. The message names its folder."""


@functools.lru_cache(maxsize=2)
def _loaded(folder: str, layer: int, pool: str) -> PictureEncoder:
    return load_picture_encoder(folder, layer=layer, pool=pool)


def encoder_kind(folder: str | os.PathLike[str], layer: int = -1, pool: str = "patches") -> str:
    """Return the `preprocessing` of an index whose features an encoder made.

    Args:
        folder: the folder of the vision model.
        layer, pool: as `data import` got them.

    Raises:
        ValueError: the folder holds no vision model, or `layer` or `pool` does not fit it.
    """
    return _loaded(str(Path(folder).resolve()), layer, pool).kind


def is_encoder_kind(kind: str) -> bool:
    """Return whether a kind of pictures is one of an encoder."""
    return _KIND.fullmatch(kind) is not None


def check_same_kind(made_by: str, kind: str) -> None:
    """Raise ValueError if pictures of `kind` would become other features than those made by `made_by`.

    Either may be "", which is unknown, but an index must know the encoder of its features. Its folder may have moved.
    """
    own, given = _KIND.fullmatch(made_by), _KIND.fullmatch(kind)
    if own is None:
        if made_by and kind and made_by != kind:
            other = f"as {kind}" if given is None else f"by layer {given[1]} and pool {given[2]} of {given[4]}"
            raise ValueError(
                f"preprocessing: the features were made as {made_by}, but pictures of the index become features {other}"
            )
        return
    if given is not None and given[3] == own[3]:
        return
    made = f"the features were made with layer {own[1]} and pool {own[2]} of {own[4]}"
    if not kind:
        raise ValueError(f"encoder: {made}, but the index does not know this; build it again")
    if given is None:
        raise ValueError(f"encoder: {made}, got {shown(kind)}")
    is_alike = (given[1], given[2]) == (own[1], own[2])
    other = "other weights or settings" if is_alike else f"layer {given[1]} and pool {given[2]}"
    raise ValueError(f"encoder: {made}, got {other} of {given[4]}")


def is_loadable(kind: str) -> bool:
    """Return whether the encoder of a kind is in its folder."""
    try:
        _encoder(kind)
    except EncoderError:
        return False
    return True


def moved(kind: str, folder: str | os.PathLike[str]) -> str:
    """Return a kind with another folder of the same encoder.

    Raises:
        ValueError: the kind is not one of an encoder.
    """
    found = _KIND.fullmatch(kind)
    if found is None:
        raise ValueError(
            "encoder: the index does not know a vision model that made its features; build it again with --encoder"
        )
    return f"encoder {found[1]} {found[2]} {found[3]} {Path(folder).resolve()}"


def preprocessing_of(kind: str) -> Preprocessing:
    """Return how the encoder of a kind scales pictures; raises EncoderError as `encoded`."""
    return _encoder(kind).preprocessing


def encoded(pixels: np.ndarray, kind: str, device: torch.device | str = "cpu") -> Tensor:
    """Return the features (n, k, f) float32 of pixels (n, side, side, 3) uint8, on the CPU.

    The pixels have the size that `preprocessing_of` tells. The encoder runs on `device`.

    Raises:
        EncoderError: the encoder cannot be loaded, or is not the one of the index.
    """
    encoder = _encoder(kind).to(device)
    return torch.cat([encoder(part) for part in torch.from_numpy(pixels).split(_BATCH)]).to(torch.float32)


def _encoder(kind: str) -> PictureEncoder:
    found = _KIND.fullmatch(kind)
    assert found is not None
    layer, pool, digest, folder = found.groups()
    try:
        encoder = _loaded(folder, int(layer), pool)
    except ValueError as error:
        advice = "if it was moved, name its folder with --encoder DIR, or record it with itm-fast index relocate"
        raise EncoderError(f"{error}; {advice}") from None
    if encoder.digest != digest:
        raise EncoderError(f"{folder}: not the encoder that made the features of the index, or it has changed")
    return encoder
