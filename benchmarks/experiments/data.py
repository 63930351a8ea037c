"""The data of the experiments: the bundled data or a part of them, and fingerprints of data.

Inside: `bundled_data`, `bundled_split`, `bundled_fingerprints`, `folder_fingerprints`, `vision_fingerprints`.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from itm_fast.files import atomic

if TYPE_CHECKING:
    import numpy as np

    from itm_fast.training import TrainConfig

__all__ = [
    "Fingerprints",
    "bundled_data",
    "bundled_fingerprints",
    "bundled_split",
    "folder_fingerprints",
    "vision_fingerprints",
]

# Purpose of data ("train", "validation", "evaluation" or "vision model") to SHA-256 by file name.
Fingerprints = dict[str, dict[str, str]]


def bundled_data(folder: Path, train_images: int | None) -> Path:
    """Write the bundled data in the published layout, with all or some training pictures, evenly spread."""
    import numpy as np

    from itm_fast.data import emoji

    if train_images is None:
        return emoji.write_dataset(folder / "data")
    folder = folder / f"data-{train_images}"
    texts = {"vocab.json": emoji.vocabulary().to_json()}
    for split in emoji.SPLITS:
        pictures, captions = bundled_split(split, train_images)
        texts[f"{split}_caps.txt"] = "".join(f"{caption}\n" for caption in captions)
        with atomic.atomic_file(folder / f"{split}_ims.npy") as file:
            np.save(file, emoji.patches(pictures))
    for name, text in texts.items():
        atomic.write_text(folder / name, text)
    return folder


def bundled_split(split: str, train_images: int | None, *, rest: bool = False) -> tuple[np.ndarray, list[str]]:
    """Return pictures and captions of a split, of "train" a number evenly spread over all; with `rest`, all others."""
    import numpy as np

    from itm_fast.data import emoji

    pictures, captions = emoji.pictures(split), emoji.captions(split)
    if split != "train" or train_images is None:
        return pictures, captions
    if not 1 <= train_images <= len(pictures):
        raise ValueError(f"train_images: expected a number from 1 to {len(pictures)}, got {train_images}")
    kept = np.arange(train_images) * len(pictures) // train_images
    if rest:
        kept = np.setdiff1d(np.arange(len(pictures)), kept)
    return pictures[kept], [captions[5 * image + number] for image in kept for number in range(5)]


def bundled_fingerprints(train_images: int | None, validation_split: str, split: str) -> Fingerprints:
    """Return fingerprints of the features, captions and words that `bundled_data` writes, without writing them."""
    used = {"train": "train", "validation": validation_split, "evaluation": split}
    return {use: _bundled_split_fingerprints(name, train_images) for use, name in used.items()}


@functools.lru_cache
def _bundled_split_fingerprints(split: str, train_images: int | None) -> dict[str, str]:
    from itm_fast.data import emoji

    pictures, captions = bundled_split(split, train_images)
    features = hashlib.sha256()
    for start in range(0, len(pictures), 256):
        features.update(emoji.patches(pictures[start : start + 256]))
    return {
        f"{split}_caps.txt": hashlib.sha256("\n".join(captions).encode()).hexdigest(),
        f"{split}_ims.npy": features.hexdigest(),
        "vocab.json": hashlib.sha256(emoji.vocabulary().to_json().encode()).hexdigest(),
    }


def folder_fingerprints(config: TrainConfig, split: str, images: int | None) -> Fingerprints:
    """Return fingerprints of a training's inputs and of the images of `split` for its evaluation."""
    from itm_fast.data import open_split
    from itm_fast.training.fingerprint import fingerprints
    from itm_fast.training.run import load_data

    # The model that a run starts from has an identity of its own, and the same vocabulary.
    vocabulary, train_data, validation_data = load_data(attrs.evolve(config, start=None))
    evaluated = open_split(config.data, split, vocabulary, max_images=images)
    used = {"train": train_data, "validation": validation_data, "evaluation": evaluated}
    return {use: fingerprints(data) for use, data in used.items()}


def vision_fingerprints(config: TrainConfig) -> Fingerprints:
    """Return fingerprints of the settings and weights of a training's vision model; none without one."""
    if config.image_backbone is None:
        return {}
    files = sorted(path for path in Path(config.image_backbone).iterdir() if path.suffix in (".json", ".safetensors"))
    return {"vision model": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}}
