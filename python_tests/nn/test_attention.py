"""The attention of words over regions: the published equations in float64, and a whole model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from itm_fast import models
from itm_fast.data import PrecomputedDataset, Vocabulary
from itm_fast.evaluation import word_attention
from itm_fast.nn import CrossAttentionScores
from python_tests.helpers.concepts import write_concepts


def attention_in_numpy(words: np.ndarray, regions: np.ndarray, temperature: float, slope: float) -> np.ndarray:
    """Return the weights of SCAN with clipped_l2norm, element by element in float64."""
    n, k = len(words), len(regions)
    clipped = np.empty((n, k))
    for j in range(n):
        for i in range(k):
            dot = float(np.dot(words[j].astype(np.float64), regions[i].astype(np.float64)))
            clipped[j, i] = dot if dot > 0 else slope * dot
    weights = np.empty((n, k))
    for j in range(n):
        scaled = [clipped[j, i] / (np.sqrt(sum(clipped[:, i] ** 2)) + 1e-8) for i in range(k)]
        powers = np.exp(temperature * np.array(scaled))
        weights[j] = powers / powers.sum()
    return weights


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_concepts(tmp_path_factory.mktemp("concepts"))


def model_and_data(data: Path, **options: object) -> tuple[models.MatchingModel, PrecomputedDataset]:
    vocabulary = Vocabulary.build((data / "train_caps.txt").read_text().splitlines(), 1)
    torch.manual_seed(0)
    options = {"embed_dim": 16, "word_dim": 12, "word_dropout": 0.5, **options}
    model = models.create("scan", vocab_size=len(vocabulary), feature_dim=8, **options)
    return model, PrecomputedDataset(data, "dev", vocabulary)


@pytest.mark.parametrize("direction", ["t2i", "mean"])
def test_weights_are_those_of_the_equations(data: Path, direction: str) -> None:
    model, dev = model_and_data(data, direction=direction, t2i_temperature=12.0, negative_slope=0.2)
    model.train()
    chosen = torch.tensor([7, 0, 33])
    for index, weights in zip(chosen.tolist(), word_attention(model, dev, chosen), strict=True):
        model.eval()
        with torch.no_grad():
            words = model.encode_captions(*dev.caption_batch([index])).values.numpy()
            regions = model.encode_images(dev.image_batch([index // 5])).values.numpy()
        model.train()
        assert weights.shape == (len(words), 4) == (6, 4)
        assert weights.dtype == torch.float32
        assert weights.sum(dim=1).tolist() == pytest.approx([1.0] * 6, abs=1e-6)
        np.testing.assert_allclose(weights, attention_in_numpy(words, regions, 12.0, 0.2), atol=2e-6)
        assert weights.std(dim=1).min() > 1e-3
    assert model.training, "the mode is put back"


def test_weights_are_those_behind_the_scores(data: Path) -> None:
    """The score of a pair can be computed from its attention weights."""
    model, dev = model_and_data(data)
    model.eval()
    with torch.no_grad():
        words, regions = model.encode_captions(*dev.caption_batch([3])), model.encode_images(dev.image_batch([8]))
        score = model.score(regions, words)
    (weights,) = word_attention(model, dev, torch.tensor([3]), images=torch.tensor([8]))
    attended = weights @ regions[0]
    assert float(torch.cosine_similarity(words[0], attended).mean()) == pytest.approx(float(score), abs=1e-5)


def test_a_word_looks_at_the_region_that_fits_it() -> None:
    words, regions = torch.eye(3), torch.eye(3)[[2, 0, 1]]
    weights = CrossAttentionScores(temperature=9.0).weights(words, regions)
    peak = np.exp(9) / (np.exp(9) + 2)
    expected = np.full((3, 3), (1 - peak) / 2)
    expected[[0, 1, 2], [1, 2, 0]] = peak
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    equal = CrossAttentionScores(temperature=1.0, normalization="no_norm", focal="equal").weights(words, regions)
    np.testing.assert_array_equal(equal, (expected > 0.5).astype(np.float32))


def test_models_without_such_attention_are_named(data: Path) -> None:
    model, dev = model_and_data(data, direction="i2t")
    with pytest.raises(ValueError, match=r"^direction: in this model regions attend to words \(i2t\), not words to"):
        word_attention(model, dev, torch.tensor([0]))
    vsepp = models.create("vsepp", vocab_size=len(dev.vocabulary), feature_dim=8, embed_dim=4, word_dim=4)
    with pytest.raises(ValueError, match=r"^model: the words of VSEPP do not attend to regions$"):
        word_attention(vsepp, dev, torch.tensor([0]))
    model, dev = model_and_data(data)
    images, captions = model.encode_images(dev.image_batch([0, 1])), model.encode_captions(*dev.caption_batch([0]))
    with pytest.raises(ValueError, match=r"^captions: expected one for each of 2 images, got 1$"):
        model.word_attention(images, captions)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": "high"}, TypeError, "temperature: expected a finite number, got 'high'"),
        ({"temperature": float("nan")}, ValueError, "temperature: expected a finite number, got nan"),
        ({"focal": "soft"}, ValueError, "focal: expected one of None, 'equal', 'prob', 'hard', got 'soft'"),
        ({"normalization": "l3norm"}, ValueError, "normalization: expected one of 'clipped_l2norm'"),
        ({"aggregation": "median"}, ValueError, "aggregation: expected one of 'mean'"),
        ({"aggregation": "logsumexp", "logsumexp_temperature": 0}, ValueError, "logsumexp_temperature: expected a"),
    ],
)
def test_options_are_checked_at_construction(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        CrossAttentionScores(**options)
