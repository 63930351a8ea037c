"""A data set that a model learns within seconds: images of four concepts, with captions that name them.

Inside: `write_concepts`, `with_boxes`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

WORDS = ["red", "ball", "dog", "tree", "car", "boat", "sun", "cup", "hat", "fish", "door", "lamp"]


def write_concepts(directory: Path, *, n_train: int = 24, n_dev: int = 10, width: int = 8, seed: int = 0) -> Path:
    """Write train, dev and test in the published layout: four regions of `width` values and five captions per image.

    Each region shows one of twelve concepts: a fixed vector plus noise. Captions name the four concepts in any order.
    """
    random = np.random.default_rng(seed)
    prototypes = random.standard_normal((len(WORDS), width)).astype(np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    for split, n_images in (("train", n_train), ("dev", n_dev), ("test", n_dev)):
        concepts = np.stack([random.permutation(len(WORDS))[:4] for _ in range(n_images)])
        noise = 0.1 * random.standard_normal((n_images, 4, width))
        np.save(directory / f"{split}_ims.npy", (prototypes[concepts] + noise).astype(np.float32))
        captions = [" ".join(WORDS[word] for word in random.permutation(row)) for row in concepts for _ in range(5)]
        (directory / f"{split}_caps.txt").write_text("\n".join(captions) + "\n", encoding="utf-8")
    return directory


def with_boxes(data: Path, folder: Path) -> Path:
    """Link the files of a data folder into another one, and add boxes (x0, y0, x1, y1) of the regions of each split."""
    folder.mkdir(parents=True)
    for path in data.iterdir():
        (folder / path.name).symlink_to(path)
    for seed, path in enumerate(sorted(data.glob("*_ims.npy"))):
        images, regions, _ = np.load(path, mmap_mode="r").shape
        corners = np.random.default_rng(seed).uniform(size=(images, regions, 2, 2)).astype(np.float32)
        boxes = np.sort(corners, axis=2).reshape(images, regions, 4)
        np.save(folder / path.name.replace("_ims", "_boxes"), boxes)
    return folder
