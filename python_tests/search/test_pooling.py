"""Pooled vectors and calibration, compared with formulas in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast.data import CaptionDataset
from itm_fast.fragments import Fragments
from itm_fast.search import Index, calibrate, learning, recalls, refining, searching, writing
from itm_fast.search.calibration import candidate_ranks
from itm_fast.search.members import Members
from itm_fast.search.pooling import Pooling, set_features
from python_tests.helpers.search import concepts, rounded, scan, scan_score


@pytest.fixture(scope="module")
def train(data: Path) -> CaptionDataset:
    return concepts(data)


def features_of(rows: np.ndarray, landmarks: np.ndarray, words: np.ndarray) -> np.ndarray:
    unit = lambda one: one / np.linalg.norm(one, axis=1, keepdims=True)  # noqa: E731
    sharp = np.exp(20 * unit(rows) @ unit(words).T)
    contained = (sharp / sharp.sum(1, keepdims=True)).mean(0)
    return np.concatenate([rows.mean(0), [max(float(row @ one) for row in rows) for one in landmarks], contained])


def test_features_of_a_set_are_its_mean_its_best_products_and_its_words() -> None:
    torch.manual_seed(0)
    sets = Fragments(torch.randn(7, 3), torch.tensor([0, 2, 2, 7]))
    landmarks, vocabulary = torch.randn(4, 3), torch.randn(5, 3)
    found = set_features(sets, landmarks, vocabulary)
    for number in (0, 2):
        expected = features_of(sets[number].double().numpy(), landmarks.double().numpy(), vocabulary.double().numpy())
        np.testing.assert_allclose(found[number], expected, atol=1e-6)
    assert found[1].tolist() == [0] * 12
    assert torch.equal(set_features(sets, landmarks, vocabulary[:0]), found[:, :7])


def test_the_learned_pooling_is_the_ridge_regression_of_the_scores(
    train: CaptionDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inner products equal F_c M F_i' with M = (K + r)^-1 A (G + r)^-1 for features of unit variance, in float64."""
    monkeypatch.setattr(learning, "refined", lambda _captions, _images, _scores, maps, _held_out: maps)
    model = scan()
    with torch.no_grad():
        images = model.encode_images(torch.from_numpy(np.asarray(train.features)))
        captions = model.encode_captions(train.captions)
        others = model.encode_captions(train.captions[::9])
    thirds = [[images.index_select(one)] for one in torch.arange(24).split(9)]
    pooling = learning.pooling_of(Members(model), thirds, [[captions]], [others])
    part = pooling.parts[0]
    assert part is not None
    landmarks, vocabulary = (part["captions"].landmarks.double().numpy(), part["captions"].words.double().numpy())
    assert not len(part["images"].words)
    regions = [images[number].double().numpy() for number in range(24)]
    words = [captions[number].double().numpy() for number in range(120)]
    scores = np.array([[scan_score(text, image) for image in regions] for text in words])
    sides = []
    for sets, contained in ((words, vocabulary), (regions, vocabulary[:0])):
        features = np.stack([features_of(one, landmarks, contained) for one in sets])
        centred = np.concatenate([(features - features.mean(0)) / features.std(0), np.ones((len(sets), 1))], 1)
        covariance = centred.T @ centred / len(sets)
        sides.append((centred, np.linalg.inv(covariance + 1e-2 * np.eye(len(covariance)))))
    (of_words, left), (of_regions, right) = sides
    fitted = of_words @ left @ (of_words.T @ scores @ of_regions / scores.size) @ right @ of_regions.T
    found = pooling("captions", [captions]) @ pooling("images", [images]).t()
    # The rank is at most that of the features of the images, 24.
    np.testing.assert_allclose(found, fitted, atol=2e-3 * np.abs(fitted).max())
    again = Pooling.of_tensors(pooling.tensors(), 1)
    assert again.blend == pooling.blend
    assert torch.equal(again("captions", [captions]), pooling("captions", [captions]))


def test_the_blend_has_the_best_recall_with_few_candidates(
    train: CaptionDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "_BLEND_CANDIDATES", 6)
    monkeypatch.setattr(learning, "_TOP", 4)
    members = Members(scan())
    with torch.no_grad():
        images = members.encode_images(torch.from_numpy(np.asarray(train.features)))[0]
        captions = members.encode_captions(train.captions[::7])[0]
    pooling = learning.learned_pooling(members, train)
    halves = [[images.index_select(part)] for part in torch.arange(24).split(12)]
    products = (pooling("captions", [captions]) @ pooling("images", [images]).t()).numpy()
    shares = dict.fromkeys([(0.0, 1.0), (1.0, 8.0), (1.0, 4.0), (1.0, 2.0), (1.0, 1.0), (1.0, 0.0)], 0)
    for number in range(len(captions)):
        words = captions[number].numpy()
        best = np.argsort([-scan_score(words, images[image].numpy()) for image in range(24)])[:4]
        fits = np.array([(words @ images[image].numpy().T).max(1).mean() for image in range(24)])
        for weights in shares:
            blended = weights[0] * products[number] + weights[1] * fits
            shares[weights] += len({*best} & {*np.argsort(-blended)[:6]})
    found = learning.best_blend(members, pooling, halves, [captions])
    assert shares[found] == max(shares.values()) > min(shares.values())


def test_refined_maps_order_the_best_images_of_other_captions_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """The divergence of the softmax over images, in NumPy, is smaller than that of the least squares."""
    chance = np.random.default_rng(0)
    captions, images = chance.standard_normal((700, 12)), chance.standard_normal((90, 10))
    scores = np.exp(captions @ chance.standard_normal((12, 10)) @ images.T / 12)
    left, values, right = np.linalg.svd(np.linalg.lstsq(captions, scores, rcond=None)[0] @ np.linalg.pinv(images).T)
    given = left[:, :4] * values[:4] ** 0.5, right[:4].T * values[:4] ** 0.5
    temperature = float((scores[:500].max(1) - scores[:500].mean(1)).mean()) / 8

    def divergence(maps: tuple[np.ndarray, ...]) -> float:
        logs = []
        for one in (scores[500:], captions[500:] @ maps[0] @ (images @ maps[1]).T):
            shifted = (one - one.max(1, keepdims=True)) / temperature
            logs.append(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))
        return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(1).mean())

    first, second, wanted = (torch.from_numpy(one).float() for one in (captions, images, scores))
    maps = (torch.from_numpy(given[0]).float(), torch.from_numpy(given[1]).float())
    arguments = (first[:500], second, wanted[:500], maps, (first[500:], wanted[500:]))
    monkeypatch.setattr(refining, "_RATE", 0.05)
    found = refining.refined(*arguments)
    assert divergence(tuple(one.double().numpy() for one in found)) < 0.8 * divergence(given)
    again = refining.refined(*arguments)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    monkeypatch.setattr(refining, "_RATE", 50)
    assert refining.refined(*arguments) is maps
    assert refining.refined(first[:500], second, torch.ones(500, 90), maps, (first[500:], wanted[500:])) is maps


@pytest.mark.parametrize(("dtype", "of"), [("bf16", "images"), ("int8", "images"), ("bf16", "captions")])
def test_best_rows_of_the_shortlist_choose_the_candidates(
    train: CaptionDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, of: str
) -> None:
    """Of the 12 nearest pooled vectors, the 4 with the greatest MaxSim are scored, in plain loops."""
    monkeypatch.setattr(searching, "SHORTLIST", 3)
    monkeypatch.setattr(writing, "SEGMENT_BYTES", 4000)
    index = Index.build(scan(), train, tmp_path / "index", pooling="mean", dtype=dtype, batch_size=5)
    assert min(sum(one.side == side for one in index.manifest.segments) for side in ("images", "captions")) > 1
    model = scan()
    with torch.no_grad():
        images = model.encode_images(torch.from_numpy(np.asarray(train.features)))
        captions = model.encode_captions(train.captions)
    query = captions[7] if of == "images" else images[3]
    items = images if of == "images" else captions
    unit = lambda one: one / (one.norm() + 1e-8)  # noqa: E731
    nearness = [float(unit(query.mean(0)) @ unit(items[number].mean(0))) for number in range(len(items))]
    shortlist = np.argsort(nearness)[::-1][:12]
    fits = {}
    for number in shortlist.tolist():
        stored = rounded(items[number], dtype)
        words, regions = (query.numpy(), stored) if of == "images" else (stored, query.numpy())
        fits[number] = max_mean(words, regions)
    expected = {index.items(of)[number].id for number in sorted(fits, key=lambda one: -fits[one])[:4]}
    given = {"texts": train.captions[7]} if of == "images" else {"features": np.asarray(train.features)[3:4]}
    (found,) = index.search(**given, k=4, candidates=4, of=of)
    assert {hit.item.id for hit in found.hits} == expected
    assert found.scored == 4


def max_mean(words: np.ndarray, regions: np.ndarray) -> float:
    return float(np.mean([max(word @ region for region in regions) for word in words]))


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
