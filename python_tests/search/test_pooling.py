"""Pooled vectors and calibration, compared with formulas in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast.data import CaptionDataset
from itm_fast.fragments import Fragments
from itm_fast.search import Index, calibrate, learning, recalls
from itm_fast.search.calibration import candidate_ranks
from itm_fast.search.members import Members
from itm_fast.search.pooling import Pooling, set_features
from python_tests.helpers.search import concepts, scan, scan_score


@pytest.fixture(scope="module")
def train(data: Path) -> CaptionDataset:
    return concepts(data)


def features_of(rows: np.ndarray, landmarks: np.ndarray) -> np.ndarray:
    return np.concatenate([rows.mean(0), [max(float(row @ one) for row in rows) for one in landmarks]])


def test_features_of_a_set_are_its_mean_and_its_best_products() -> None:
    torch.manual_seed(0)
    sets = Fragments(torch.randn(7, 3), torch.tensor([0, 2, 2, 7]))
    landmarks = torch.randn(4, 3)
    found = set_features(sets, landmarks)
    for number in (0, 2):
        expected = features_of(sets[number].numpy(), landmarks.numpy())
        np.testing.assert_allclose(found[number], expected, atol=1e-6)
    assert found[1].tolist() == [0] * 7


def test_the_learned_pooling_is_the_ridge_regression_of_the_scores(train: CaptionDataset) -> None:
    """Inner products equal F_c M F_i' with M = (K + r)^-1 A (G + r)^-1, all in float64."""
    model = scan()
    pooling = learning.learned_pooling(Members(model), train)
    part = pooling.parts[0]
    assert part is not None
    landmarks = part["images"].landmarks.double().numpy()
    with torch.no_grad():
        images = model.encode_images(torch.from_numpy(np.asarray(train.features)))
        captions = model.encode_captions(train.captions)
    regions = [images[number].double().numpy() for number in range(24)]
    words = [captions[number].double().numpy() for number in range(120)]
    scores = np.array([[scan_score(text, image) for image in regions] for text in words])
    sides = []
    for sets in (words, regions):
        features = np.stack([features_of(one, landmarks) for one in sets])
        centred = np.concatenate([features - features.mean(0), np.ones((len(sets), 1))], 1)
        covariance = centred.T @ centred / len(sets)
        ridge = 1e-4 * np.diag(covariance).mean() * np.eye(len(covariance))
        sides.append((centred, np.linalg.inv(covariance + ridge)))
    (of_words, left), (of_regions, right) = sides
    fitted = of_words @ left @ (of_words.T @ scores @ of_regions / scores.size) @ right @ of_regions.T
    found = pooling("captions", [captions]) @ pooling("images", [images]).t()
    # The rank is at most that of the features, which is below 256.
    np.testing.assert_allclose(found, fitted, atol=2e-3 * np.abs(fitted).max())
    again = Pooling.of_tensors(pooling.tensors(), 1)
    assert torch.equal(again("captions", [captions]), pooling("captions", [captions]))


def test_calibration_counts_the_candidates_that_hold_the_best(train: CaptionDataset, tmp_path: Path) -> None:
    index = Index.build(scan(), train, tmp_path / "index")
    texts = ["red ball", "dog", "boat sun cup", "fish lamp door tree"]
    ranks = candidate_ranks(index, texts, 5)
    assert ranks.shape == (4, 5)
    for count in (1, 5, 9, 24):
        shares = []
        for text in texts:
            best = {hit.item.id for hit in index.search(text, 5, exact=True)[0].hits}
            found = {hit.item.id for hit in index.search(text, 5, candidates=max(count, 5))[0].hits}
            if count >= 5:
                shares.append(len(best & found) / 5)
        if shares:
            assert recalls(ranks, [count]) == [pytest.approx(np.mean(shares))]
    monotone = recalls(ranks, range(25))
    assert monotone == sorted(monotone)
    assert (monotone[0], monotone[24]) == (0, 1)
    candidates, recall = calibrate(index, texts, 0.6, 5)
    assert candidates == 20
    assert recall == recalls(ranks, [20])[0] >= 0.6
    assert Index.open(index.path).manifest.candidates == 20
    assert index.search("dog", 3)[0].scored == 20
    with pytest.raises(ValueError, match="recall: expected a number above 0 and at most 1, got 0"):
        calibrate(index, texts, 0)
