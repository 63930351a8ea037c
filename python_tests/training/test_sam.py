"""SAM: CIDEr-D against a plain evaluation over words, and margins and hinges against loops."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from itm_fast.data.cider import CiderD
from itm_fast.training.rivals.sam import adaptive_losses
from python_tests.helpers.runs import config, make_trainer

CAPTIONS = {
    0: ["a red dog runs on the grass", "a dog runs", "the red dog on grass"],
    1: ["a blue bird sits on a tree", "bird", "a bird sits on a tree and sings a song"],
    2: ["a red car", "the car is red and the road is wet"],
}


def cider_d(caption: str, image: int) -> float:
    """Evaluate CIDEr-D with counters of n-grams of words, one caption and image at a time."""

    def grams(text: str, n: int) -> Counter[tuple[str, ...]]:
        words = text.split()
        return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))

    total = 0.0
    for reference in CAPTIONS[image]:
        of_n = []
        for n in (1, 2, 3, 4):

            def weights(text: str, n: int = n) -> dict[tuple[str, ...], float]:
                found = {}
                for gram, count in grams(text, n).items():
                    seen = sum(any(gram in grams(other, n) for other in others) for others in CAPTIONS.values())
                    found[gram] = count * (math.log(len(CAPTIONS)) - math.log(max(seen, 1)))
                return found

            one, other = weights(caption), weights(reference)
            norms = [math.sqrt(sum(value**2 for value in part.values())) for part in (one, other)]
            shared = sum(min(one[gram], other[gram]) * other[gram] for gram in one if gram in other)
            of_n.append(shared / (norms[0] * norms[1]) if all(norms) else 0.0)
        gap = len(caption.split()) - len(reference.split())
        total += sum(of_n) / 4 * math.exp(-(gap**2) / 72)
    return 10 * total / len(CAPTIONS[image])


def test_cider_d_equals_a_plain_evaluation() -> None:
    """Captions in any order of images, with word numbers from 4 and 1 and 2 around a caption."""
    pairs = [(text, image) for image, texts in CAPTIONS.items() for text in texts]
    pairs = pairs[3:] + pairs[:3]
    words = sorted({word for text, _ in pairs for word in text.split()})
    ids = [[1, *(4 + words.index(word) for word in text.split()), 2] for text, _ in pairs]
    measure = CiderD(
        torch.tensor([one for each in ids for one in each], dtype=torch.int32),
        torch.tensor([len(each) for each in ids]),
        torch.tensor([image for _, image in pairs]),
    )
    captions = torch.arange(len(pairs)).repeat(3)
    images = torch.arange(3).repeat_interleave(len(pairs))
    found = measure.scores(captions, images)
    expected = [cider_d(pairs[c][0], i) for c, i in zip(captions.tolist(), images.tolist(), strict=True)]
    assert max(expected) > 3
    assert sum(one == 0 for one in expected) < len(expected) / 2
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_hinges_with_adaptive_margins() -> None:
    scores = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    captions, images = torch.tensor([2, 0, -1, 1]), torch.tensor([1, 3, 0, -1])
    margins = torch.rand(2, 4, generator=torch.Generator().manual_seed(1)).double() - 0.2
    found = adaptive_losses(scores, captions, images, margins)
    plain = scores.detach()
    for i in range(4):
        expected = [
            max(0.0, float(plain[i, captions[i]] - plain[i, i] + margins[0, i])) if captions[i] >= 0 else 0.0,
            max(0.0, float(plain[images[i], i] - plain[i, i] + margins[1, i])) if images[i] >= 0 else 0.0,
        ]
        assert found[:, i].tolist() == pytest.approx(expected)
    found.sum().backward()
    assert float(scores.grad.sum()) == 0.0
    assert float(scores.grad.abs().sum()) == 2 * float((found > 0).sum())


@pytest.mark.parametrize("samples", ["hardest", "random"])
def test_the_margins_of_a_batch(data: Path, tmp_path: Path, samples: str) -> None:
    """Negatives are of other images; the better a negative describes the image, the smaller its margin."""
    settings = config(data, tmp_path, scenario="sam", model="vsepp", sam_samples=samples, sam_divisor=4.0)
    trainer = make_trainer(settings)
    scenario, train = trainer.stepper.scenario, trainer.train_data
    batch = next(trainer._batches(0))
    functions = trainer.stepper._functions(batch, "hardest", None)
    scores = functions.scores(trainer.model)
    captions, images = scenario._negatives(scores.detach(), functions.images)
    for chosen in (captions, images):
        assert bool((functions.images[chosen] != functions.images).all())
    margins = scenario._margins(functions, captions, images)
    measure = CiderD(train.token_ids, train.caption_lengths, train.caption_image)
    own = measure.scores(batch.caption_index, batch.image_index)
    other = measure.scores(batch.caption_index[captions], batch.image_index)
    torch.testing.assert_close(margins[0], ((own - other) / 4).clamp(max=1.0))
    # A negative image stands for its caption in the batch.
    other = measure.scores(batch.caption_index[images], batch.image_index)
    torch.testing.assert_close(margins[1], ((own - other) / 4).clamp(max=1.0))
    assert float(margins.std()) > 0.01
    if samples == "hardest":
        hidden = scores.detach().masked_fill(functions.images[:, None] == functions.images, -torch.inf)
        assert torch.equal(captions, hidden.argmax(1))
        assert torch.equal(images, hidden.argmax(0))


@pytest.mark.parametrize("mean", [False, True])
def test_a_step_adds_the_weighted_hinges(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mean: bool
) -> None:
    trainer = make_trainer(config(data, tmp_path, scenario="sam", model="vsepp", sam_weight=3.0, mean_loss=mean))
    scenario, batch = trainer.stepper.scenario, next(trainer._batches(0))
    same = batch.image_index[:, None] == batch.image_index
    functions = trainer.stepper._functions(batch, "hardest", same)
    totals, backward = [], scenario.target.backward

    def noting(loss: torch.Tensor, number: int) -> dict[str, float]:
        totals.append(float(loss.detach()))
        return backward(loss, number)

    monkeypatch.setattr(scenario.target, "backward", noting)
    with torch.no_grad():
        scores, own = functions.scores_and_loss(trainer.model.train())
        captions, images = scenario._negatives(scores, functions.images)
        hinges = adaptive_losses(scores, captions, images, scenario._margins(functions, captions, images))
    trainer.stepper(batch, "hardest", 0)
    assert float(hinges.sum()) > 0.1
    expected = float(own) + 3.0 * float(hinges.sum()) / (len(scores) if mean else 1)
    assert totals == pytest.approx([expected], rel=1e-5)
