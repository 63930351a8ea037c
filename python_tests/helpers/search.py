"""Small indexes of the concepts data set, and the scores that a search must give, in plain loops.

Inside: `concepts`, `scan`, `vsepp`, `rounded`, `scan_score`, `likeness`, `files_of`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from itm_fast import models
from itm_fast.data import CaptionDataset, Vocabulary
from itm_fast.search.manifest import read_manifest
from python_tests.helpers.concepts import WORDS
from python_tests.helpers.precomputed import SPECIAL

VOCABULARY = Vocabulary([*SPECIAL, *WORDS])


def concepts(data: Path, split: str = "train") -> CaptionDataset:
    """Load a split of the concepts data set; its images are named "{split}0", "{split}1", ..."""
    features = np.load(data / f"{split}_ims.npy")
    captions = (data / f"{split}_caps.txt").read_text().splitlines()
    owners = np.arange(len(captions)) // 5
    names = [f"{split}{number}" for number in range(len(features))]
    return CaptionDataset(features, captions, owners, VOCABULARY, image_ids=names)


def _model(name: str, seed: int, **options: object) -> models.MatchingModel:
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(VOCABULARY), "feature_dim": 8, "embed_dim": 16, "word_dim": 12}
    model = models.create(name, **{**sizes, **options}).eval()
    model.tokenizer = VOCABULARY
    return model


def scan(seed: int = 0, **options: object) -> models.MatchingModel:
    """Make SCAN with random weights and the defaults: words attend to regions."""
    return _model("scan", seed, **options)


def vsepp(seed: int = 0) -> models.MatchingModel:
    return _model("vsepp", seed)


def rounded(rows: torch.Tensor, dtype: str) -> np.ndarray:
    """Return rows as an index stores them, in float64."""
    if dtype == "bf16":
        return rows.bfloat16().double().numpy()
    found = rows.numpy()
    scales = np.abs(found).max(axis=1, keepdims=True).astype(np.float32) / np.float32(127)
    return np.rint(found / scales).astype(np.float64) * scales.astype(np.float64)


def scan_score(words: np.ndarray, regions: np.ndarray) -> float:
    """Score a caption (n, d) and an image (k, d) by SCAN, Eq 1 to 5, with the published clip, norm and temperature."""
    raw = np.array([[float(word @ region) for region in regions] for word in words])
    clipped = np.where(raw > 0, raw, 0.1 * raw)
    normal = clipped / (np.sqrt((clipped**2).sum(0, keepdims=True)) + 1e-8)
    cosines = []
    for word, row in zip(words, normal, strict=True):
        weights = np.exp(9 * row) / np.exp(9 * row).sum()
        attended = sum(weight * region for weight, region in zip(weights, regions, strict=True))
        cosines.append(float(word @ attended) / max(np.linalg.norm(word) * np.linalg.norm(attended), 1e-8))
    return float(np.mean(cosines))


def likeness(left: np.ndarray, right: np.ndarray) -> float:
    """Return the mean over the rows of both sets of the greatest cosine with a row of the other set."""
    cosines = np.array([[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in right] for a in left])
    return float(cosines.max(1).mean() + cosines.max(0).mean()) / 2


def files_of(path: Path) -> set[str]:
    """Return the names of the files in an index that its manifest does not explain."""
    return {file.name for file in path.iterdir()} - read_manifest(path).files() - {"index.json", "lock"}
