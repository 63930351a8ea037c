"""On the published ground truth of COCO's test split, our measures are those of the package eccv_caption."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast.evaluation.ground_truth import Ids, read_positives
from itm_fast.evaluation.many_positives import positive_measures
from itm_fast.evaluation.score_protocols import score_protocol
from itm_fast.evaluation.score_sources import MatrixScores
from itm_fast.evaluation.score_truth import score_truth

pytestmark = pytest.mark.thorough

# More than the most positives of a query.
TOP = 400


def best(scores: np.ndarray, ids: np.ndarray) -> list[int]:
    chosen = np.argpartition(-scores, TOP)[:TOP]
    return ids[chosen[np.argsort(-scores[chosen])]].tolist()


def test_5000_images() -> None:
    package = pytest.importorskip("eccv_caption")
    folder = Path(package.__file__).parent / "data"
    captions = np.load(folder / "coco_test_ids.npy")
    owner = {
        int(key): value[0] for key, value in json.loads((folder / "original_caption_to_image.json").read_text()).items()
    }
    images = np.array([owner[caption] for caption in captions[::5].tolist()])
    random = np.random.default_rng(0)
    pictures = random.standard_normal((5000, 24), np.float32)
    texts = np.repeat(pictures, 5, axis=0) + 0.9 * random.standard_normal((25_000, 24), np.float32)
    scores = pictures @ texts.T
    retrieved = {
        "i2t": {int(images[i]): best(scores[i], captions) for i in range(5000)},
        "t2i": {int(captions[c]): best(scores[:, c], images) for c in range(25_000)},
    }
    metrics = package.Metrics()
    theirs = metrics.compute_all_metrics(
        retrieved["i2t"], retrieved["t2i"], target_metrics=("coco_5k_recalls", "cxc_recalls"), Ks=(1, 5, 10)
    )
    theirs |= metrics.eccv_metrics(retrieved, "all")
    theirs |= {f"eccv_r{k}": metrics.eccv_recalls(retrieved, "all", K=k) for k in (5, 10)}

    ids, source, owners = Ids(images, captions), MatrixScores(scores), torch.arange(25_000) // 5
    with warnings.catch_warnings():
        # Two positives are sixth captions of their images.
        warnings.simplefilter("ignore")
        found = {
            f"eccv_{name}": value for name, value in score_truth("eccv", source, owners, folder, ids).summary.items()
        }
    found |= {f"coco_5k_{name}": value for name, value in score_protocol("coco5k", source, owners).summary.items()}
    for way, positives in zip(("i2t", "t2i"), read_positives(folder, "cxc", ids), strict=True):
        values = positive_measures(source, positives, way)
        found |= {f"cxc_{way}_{name}": float(value.mean()) for name, value in values.items()}
    for name, by_way in theirs.items():
        kind, _, measure = name.rpartition("_") if "map_at" not in name else ("eccv", "", "map_at_r")
        for way, value in by_way.items():
            own = found[f"{kind}_{way}_{measure.replace('rprecision', 'r_precision')}"]
            assert own == pytest.approx(100 * value, rel=1e-12), (name, way)
