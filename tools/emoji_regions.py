"""Write the bundled data with region features instead of pixels, like the features of a detector for photographs.

    python -m tools.emoji_regions --out runs/emoji-regions

A detector is trained on other pictures and stays fixed. Here, SCAN's convolutional network takes its role. It is
trained on the bundled training pictures that the new data set leaves out; its outputs for the patches of a picture are
the features of the picture's regions. The folder has the published layout. The same command on the same kind of
processor gives the same files; another number of threads or another instruction set gives other features. An
interrupted call resumes where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.experiments.data import bundled_split
from itm_fast import config as settings
from itm_fast import models
from itm_fast.data import emoji
from itm_fast.files import atomic
from itm_fast.training import TrainConfig, checkpoint, train

TRAIN_IMAGES = 840
DETECTOR = {
    "model": "scan",
    "model_options": {"image_encoder": "patches", "embed_dim": 256, "word_dim": 64, "direction": "t2i"},
    "epochs": 4,
    "batch_size": 128,
    "drop_last": True,
    "lr": 2e-3,
    "lr_schedule": "cosine",
    "mining": "all",
    "validation_images": 100,
}
_BATCH = 64


def write_regions(out: Path, train_images: int = TRAIN_IMAGES, **machine: Any) -> bool:
    """Train the region network and write the folder; False if a signal stopped the training.

    Args:
        out: the folder; its subfolder `detector` holds the data and the run directory of the region network.
        train_images: number of training pictures in the data set; the others train the region network.
        machine: training settings for this machine, and overrides of those above.
    """
    other, run = out / "detector" / "data", out / "detector" / "run"
    if not (other / "vocab.json").is_file():
        for split in ("train", "dev"):
            pictures, captions = bundled_split(split, train_images, rest=True)
            _write_split(other, split, emoji.patches(pictures), captions)
        atomic.write_text(other / "vocab.json", emoji.vocabulary().to_json())
    config = settings.build(TrainConfig, {**DETECTOR, "data": str(other), "out": str(run), **machine})
    if not train(config, resume=(run / checkpoint.STATE_FILE).is_file()).finished:
        return False
    network = models.load(run).get_submodule("image_encoder")
    for split in emoji.SPLITS:
        pictures, captions = bundled_split(split, train_images)
        _write_split(out, split, regions(network, emoji.patches(pictures)), captions)
    atomic.write_text(out / "vocab.json", emoji.vocabulary().to_json())
    return True


@torch.no_grad()
def regions(network: nn.Module, patches: np.ndarray) -> np.ndarray:
    """Convert patches (n, k, f) to region features (n, k, d), float32."""
    encoded = [
        network(torch.from_numpy(patches[start : start + _BATCH])).values for start in range(0, len(patches), _BATCH)
    ]
    return torch.cat(encoded).reshape(*patches.shape[:2], -1).numpy()


def _write_split(folder: Path, split: str, features: np.ndarray, captions: list[str]) -> None:
    atomic.write_text(folder / f"{split}_caps.txt", "".join(f"{caption}\n" for caption in captions))
    with atomic.atomic_file(folder / f"{split}_ims.npy") as file:
        np.save(file, features)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes the bundled data with region features.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1); 0: torch's choice")
    options = parser.parse_args(arguments)
    if not write_regions(options.out, threads=options.threads):
        print("stopped; the same command resumes", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
