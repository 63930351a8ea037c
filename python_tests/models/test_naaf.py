"""NAAF against float64 loops over one pair at a time, and the thresholds that it learns."""

from __future__ import annotations

import math
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from itm_fast import models
from itm_fast.fragments import Fragments
from itm_fast.nn import NegativeAwareSimilarity
from python_tests.helpers.runs import config, run, same, weights

SIZES = {"vocab_size": 23, "feature_dim": 10, "embed_dim": 12, "word_dim": 7}
IDS = torch.tensor([[1, 5, 2, 9], [4, 2, 0, 0], [7, 0, 0, 0], [3, 8, 8, 1]])
LENGTHS = torch.tensor([4, 2, 1, 3])


def unit(row: Tensor) -> Tensor:
    return row / (row.square().sum().sqrt() + 1e-8)


def softmax(values: list[Tensor]) -> list[Tensor]:
    powers = [value.exp() for value in values]
    return [power / sum(powers) for power in powers]


def relations(words: Tensor, regions: Tensor, temperature: float) -> list[list[Tensor]]:
    """Return SCAN's attention of each word."""
    raw = [[word @ region for region in regions] for word in words]
    clipped = [[s if s > 0 else 0.1 * s for s in row] for row in raw]
    norms = [sum(row[k] ** 2 for row in clipped).sqrt() + 1e-8 for k in range(len(regions))]
    return [softmax([temperature * s / norm for s, norm in zip(row, norms, strict=True)]) for row in clipped]


def pair_score(words: Tensor, regions: Tensor, threshold: float, *, training: bool) -> Tensor:
    """Return the score of one pair by the steps of the official code, with temperatures 20 and 5."""
    best = [max(word @ region for region in regions) - threshold for word in words]
    of_words = []
    for j, (word, shares) in enumerate(zip(words, relations(words, regions, 20.0), strict=True)):
        gate = best[j]
        if not training:
            among = softmax([5 * (word @ other) for other in words])
            gate = sum(share * b for share, b in zip(among, best, strict=True))
        negative = best[j] if gate < 0 else 0 * best[j]
        powers = [(20 * (word @ x - threshold)).exp() if word @ x - threshold > 0 else 0 * (word @ x) for x in regions]
        total = sum(powers) + 1e-8
        attended = sum(power / total * x for power, x in zip(powers, regions, strict=True))
        norm = attended.square().sum()
        cosine = (word @ attended) / norm.sqrt().clamp(min=1e-8) if norm > 0 else 0 * (word @ attended)
        relevance = sum(share * (word @ x) for share, x in zip(shares, regions, strict=True))
        of_words.append(negative + cosine + relevance)
    return sum(of_words) / len(of_words)


def make(threshold: float, safe: float) -> tuple[models.NAAF, models.NAAF]:
    """Return a model and the same in float64, with the thresholds of training and evaluation."""
    torch.manual_seed(0)
    model = models.create("naaf", **SIZES)
    model.similarity.threshold.fill_(threshold)
    model.similarity.safe_threshold.fill_(safe)
    exact = models.create("naaf", **SIZES).double()
    exact.load_state_dict(model.state_dict())
    return model, exact


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("threshold", "safe"), [(0.0, 0.0), (0.25, 0.125), (1.0, 1.0)])
def test_scores_and_gradients_equal_the_definition(threshold: float, safe: float, training: bool) -> None:
    """Ragged images; with a threshold of 1, no region is kept."""
    model, exact = (one.train(training) for one in make(threshold, safe))
    random = torch.Generator().manual_seed(1)
    features = Fragments(torch.randn(9, 10, generator=random).double(), torch.tensor([0, 5, 7, 8, 9]))
    images, captions = exact.encode_images(features), exact.encode_captions(IDS, LENGTHS)
    expected = torch.stack([
        torch.stack([
            pair_score(captions[j], images[i], threshold if training else safe, training=training) for j in range(4)
        ])
        for i in range(4)
    ])  # fmt: skip
    single = features.to(torch.float32)
    scores = model.score(model.encode_images(single), model.encode_captions(IDS, LENGTHS))
    assert scores.dtype == torch.float32
    assert float(expected.detach().std()) > 0.1
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=2e-5)

    weight = torch.randn(4, 4, generator=random).double()
    parameters = list(exact.parameters())
    found = torch.autograd.grad((exact.score(images, captions) * weight).sum(), parameters, retain_graph=True)
    wanted = torch.autograd.grad((expected * weight).sum(), parameters)
    for (name, _), ours, theirs in zip(exact.named_parameters(), found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8, msg=name)

    pair = Fragments.from_list([images[0].float()]), Fragments.from_list([captions[0].float()])
    with torch.no_grad():
        (shown,), steps = model.word_attention(*pair), model.eval().pair_steps(*pair)["t2i"]
    shares = torch.stack([torch.stack(row) for row in relations(captions[0], images[0], 20.0)])
    torch.testing.assert_close(shown.double(), shares.detach(), rtol=0, atol=1e-5)
    assert torch.equal(steps.attention[0], shown)
    assert steps.temperatures[0].tolist() == [20.0] * 4


def learned(matched: Tensor, mismatched: Tensor, old: tuple[float, float]) -> tuple[float, float]:
    """Return the thresholds by the steps of the official code, with penalty 2."""
    mp, mn = float(matched.mean()), float(mismatched.mean())
    sp, sn = float(matched.std()), float(mismatched.std())
    a, b = sp**2 - sn**2, 2 * (mp * sn**2 - mn * sp**2)
    c = (mn * sp) ** 2 - (mp * sn) ** 2 + 2 * (sp * sn) ** 2 * math.log(sn / (2 * sp) + 1e-8)
    root = b**2 - 4 * a * c
    new = ((-b + math.sqrt(root)) / (2 * a + 1e-10), mp - 3 * sp) if root > 0 else old
    cut = [0.0 if value < 0 or value > 1 else value for value in new]
    return 0.7 * cut[0] + 0.3 * old[0], 0.7 * cut[1] + 0.3 * old[1]


def concepts(seed: int, apart: float, n: int = 12) -> tuple[Fragments, Fragments]:
    """Return images and captions whose words are near a region of their own image."""
    random = torch.Generator().manual_seed(seed)
    images = torch.nn.functional.normalize(torch.randn(n, 5, 16, generator=random), dim=2)
    words = torch.nn.functional.normalize(images[:, :4] + apart * torch.randn(n, 4, 16, generator=random), dim=2)
    lengths = torch.tensor([1 + number % 4 for number in range(n)])
    return Fragments.from_padded(images), Fragments.from_padded(words, lengths)


def test_the_thresholds_follow_the_statistics_of_matched_and_mismatched_words() -> None:
    """Three batches; captions whose own image is not ranked first do not count. Parts of a batch add up."""
    similarity = NegativeAwareSimilarity(threshold_words=10).train()
    thresholds, counts = (0.0, 0.0), []
    for seed, apart in ((0, 0.3), (1, 0.5), (2, 0.4)):
        images, captions = concepts(seed, apart)
        scores = similarity(images, captions)
        matched, mismatched = [], []
        for j in range(len(captions)):
            if int(scores[:, j].argmax()) == j:
                worst = int(scores[:, j].argmin())
                for word in captions[j].double():
                    matched.append(max(float(word @ x) for x in images[j].double()))
                    mismatched.append(max(float(word @ x) for x in images[worst].double()))
        thresholds = learned(torch.tensor(matched).double(), torch.tensor(mismatched).double(), thresholds)
        counts.append(len(matched))
        whole = similarity.statistics(images, captions, scores, 0)
        parts = [(0, 5), (5, 5), (5, 12)]
        found = [
            similarity.statistics(images, captions.index_select(torch.arange(*part)), scores[:, slice(*part)], part[0])
            for part in parts
        ]
        torch.testing.assert_close(sum(found), whole)
        similarity.update(whole)
        ours = (float(similarity.threshold), float(similarity.safe_threshold))
        assert ours == pytest.approx(thresholds, rel=1e-4, abs=1e-6)
    assert min(counts) > 10
    assert min(thresholds) > 0.05
    few = NegativeAwareSimilarity(threshold_words=200).train()
    few.threshold.fill_(0.5)
    few.update(whole)
    assert (float(few.threshold), float(few.safe_threshold)) == (0.0, 0.0)


def test_the_threshold_is_where_weighted_densities_are_equal() -> None:
    """Many words of two normal distributions, with penalty 3, and no threshold before."""
    similarity = NegativeAwareSimilarity(penalty=3.0)
    n, (mp, sp), (mn, sn) = 1000.0, (0.6, 0.1), (0.3, 0.05)
    sums = [n, n * mp, n * mp**2 + (n - 1) * sp**2, n * mn, n * mn**2 + (n - 1) * sn**2]
    similarity.update(torch.tensor(sums, dtype=torch.float64))
    t = float(similarity.threshold) / 0.7
    densities = [math.exp(-((t - m) ** 2) / (2 * s**2)) / s for m, s in ((mp, sp), (mn, sn))]
    assert densities[0] == pytest.approx(3 * densities[1], rel=1e-4)
    assert mn < t < mp
    assert float(similarity.safe_threshold) == pytest.approx(0.7 * (mp - 3 * sp), rel=1e-5)


@pytest.mark.parametrize(
    ("matched", "mismatched"),
    [([0.2, 0.3, 0.4], [0.1, 0.5, 0.9]), ([0.9, 0.8, 0.95], [0.1, 0.3, 0.2]), ([-0.2, -0.1, 0.3], [0.5, 0.6, 0.7])],
)
def test_thresholds_outside_their_range_become_zero(matched: list[float], mismatched: list[float]) -> None:
    similarity = NegativeAwareSimilarity(threshold_words=2)
    similarity.threshold.fill_(0.3)
    similarity.safe_threshold.fill_(0.6)
    one, other = torch.tensor(matched).double(), torch.tensor(mismatched).double()
    sums = [torch.tensor(3.0), one.sum(), one.square().sum(), other.sum(), other.square().sum()]
    similarity.update(torch.stack([part.double() for part in sums]))
    ours = (float(similarity.threshold), float(similarity.safe_threshold))
    assert ours == pytest.approx(learned(one, other, (0.3, 0.6)), rel=1e-5)


def test_empty_sets_score_zero_and_get_no_gradient() -> None:
    model, _ = make(0.2, 0.1)
    features = Fragments(torch.randn(3, 10), torch.tensor([0, 3, 3]))
    for training in (True, False):
        scores = model.train(training)(features, IDS[:2], torch.tensor([0, 2]))
        assert (scores[1].tolist(), scores[0, 0].item()) == ([0.0, 0.0], 0.0)
        assert scores[0, 1].item() != 0.0
    model.train()(features, IDS[:2], torch.tensor([0, 2])).sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    assert model(torch.zeros(2, 0, 10), IDS[:1, :0], torch.tensor([0])).tolist() == [[0.0], [0.0]]


def test_words_without_a_norm_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^no_txtnorm: the similarity takes words of norm 1; expected false$"):
        models.create("naaf", **SIZES, no_txtnorm=True)


def test_a_run_learns_saves_and_resumes_its_thresholds(data: Path, tmp_path: Path) -> None:
    options = {"embed_dim": 16, "word_dim": 12, "threshold_words": 2}
    settings = config(data, tmp_path / "whole", model="naaf", model_options=options, mining="all", lr=1e-2)
    run(settings)
    state = weights(tmp_path / "whole")
    assert all(0.0 < float(state[f"similarity.{name}threshold"]) < 1.0 for name in ("", "safe_"))
    parts = attrs.evolve(settings, out=str(tmp_path / "parts"), epochs=1)
    run(parts)
    torch.manual_seed(99)
    run(attrs.evolve(parts, epochs=2), resume=True)
    assert same(state, weights(tmp_path / "parts"))
    saved = models.load(tmp_path / "whole").similarity
    assert (saved.training, float(saved.threshold) > 0) == (False, True)
