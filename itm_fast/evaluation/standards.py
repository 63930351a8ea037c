"""The named protocols of published results, and the sizes that they expect.

Inside: `PROTOCOLS`, `Standard`, `check_sizes`, `folds_of`.
"""

from __future__ import annotations

import attrs

__all__ = ["PROTOCOLS", "Standard", "check_sizes", "folds_of"]

_PER_IMAGE = 5


@attrs.frozen
class Standard:
    """A named protocol.

    Attributes:
        folds: number of folds of consecutive images.
        images: the sizes of its splits in images; empty: any.
        splits: the splits, in words.
        truth: whether it needs files with more positives than the captions of an image.
        any_folds: whether it takes another number of folds.
    """

    folds: int = 1
    images: tuple[int, ...] = ()
    splits: str = ""
    truth: bool = False
    any_folds: bool = False


PROTOCOLS = {
    "full": Standard(any_folds=True),
    "f30k": Standard(
        images=(1000, 1014), splits="the test split of Flickr30K (1,000), or its validation split (1,014)"
    ),
    "coco1k": Standard(folds=5, images=(5000,), splits="all 5,000 images of the test split of COCO, in five folds"),
    "coco5k": Standard(images=(5000,), splits="all 5,000 images of the test split of COCO"),
    "eccv": Standard(truth=True),
    "cxc": Standard(truth=True),
    "pmrp": Standard(truth=True, any_folds=True),
}


def check_sizes(name: str, n_images: int, n_captions: int, *, any_captions: bool = False) -> None:
    """Raise ValueError if a protocol is for splits of another size; the message names the likely cause.

    Args:
        name: the protocol.
        n_images: number of images.
        n_captions: number of captions.
        any_captions: the image of each caption is known, so an image may have any number of captions.
    """
    standard = PROTOCOLS[name]
    if not standard.images:
        return
    found = f"found {n_images:,} images and {n_captions:,} captions"
    if n_images not in standard.images:
        cause = "another split"
        if n_images == 1000:
            cause = "one fold of COCO, or Flickr30K"
        elif n_images == 5000:
            cause = "COCO"
        raise ValueError(
            f"protocol {name}: expected {standard.splits}; {found}: {cause}? --protocol full evaluates any split"
        )
    if n_captions != n_images * _PER_IMAGE and not any_captions:
        raise ValueError(
            f"protocol {name}: expected {n_images * _PER_IMAGE:,} captions, {_PER_IMAGE} per image; {found}: keep the "
            f"first {_PER_IMAGE} captions of each image, or give the image of each caption"
        )


def folds_of(name: str, folds: int | None) -> int:
    """Return the number of folds of a protocol, or `folds` for one that does not fix it.

    Raises:
        ValueError: the protocol is unknown, or has another number of folds.
    """
    if name not in PROTOCOLS:
        raise ValueError(f"protocol: expected {', '.join(PROTOCOLS)}, got {name!r}")
    own = PROTOCOLS[name].folds
    if folds is None or folds == own:
        return own
    if not PROTOCOLS[name].any_folds:
        raise ValueError(f"protocol {name}: has {own} fold{'s' * (own > 1)}, got folds {folds}; use protocol full")
    return folds
