"""`RetrievalRecall` gives the measures of plain loops, however its batches are cut."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import numpy as np
import pytest
import torch

from itm_fast.evaluation import RetrievalRecall, metric
from python_tests.helpers.plain_retrieval import standard

RANDOM = np.random.default_rng(0)
IMAGES = torch.from_numpy(RANDOM.standard_normal((9, 4)))
OWNERS = torch.from_numpy(RANDOM.permutation(np.repeat(np.arange(9), 3)))
CAPTIONS = IMAGES[OWNERS] + torch.from_numpy(RANDOM.standard_normal((27, 4)))
# Numbers of the images in a data set.
NUMBERS = torch.tensor([70, 3, 12, 9, 55, 1, 0, 28, 400])


def expected(similarity: str, images: torch.Tensor, captions: torch.Tensor, owners: torch.Tensor) -> dict[str, float]:
    if similarity == "cosine":
        images, captions = (rows / rows.norm(dim=1, keepdim=True) for rows in (images, captions))
    return standard((images @ captions.t()).tolist(), owners.tolist())


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("size", [1, 4, 27])
def test_batches_of_pairs(similarity: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image comes again with each of its captions, as in a data loader of captions."""
    if size == 4:  # In tiles.
        monkeypatch.setattr(metric, "_WHOLE", 9 * 27 - 1)
    found = RetrievalRecall(similarity=similarity)
    for start in range(0, 27, size):
        owners = OWNERS[start : start + size]
        found.update(IMAGES[owners], CAPTIONS[start : start + size], NUMBERS[owners])
    assert found.compute() == pytest.approx(expected(similarity, IMAGES, CAPTIONS, OWNERS), rel=1e-12)


def test_images_and_captions_apart_a_reset_and_a_call() -> None:
    found = RetrievalRecall()
    for _ in range(2):
        found.update(IMAGES[:5], CAPTIONS[:10], NUMBERS[:5], NUMBERS[OWNERS[:10]])
        found.update(IMAGES[5:], CAPTIONS[10:], NUMBERS[5:], NUMBERS[OWNERS[10:]])
        assert found.compute() == pytest.approx(expected("cosine", IMAGES, CAPTIONS, OWNERS), rel=1e-12)
        found.reset()
    inside = (OWNERS < 4).nonzero().squeeze(1)
    batch = IMAGES[:4], CAPTIONS[inside], NUMBERS[:4], NUMBERS[OWNERS[inside]]
    own = expected("cosine", IMAGES[:4], CAPTIONS[inside], OWNERS[inside])
    assert found(*batch) == pytest.approx(own, rel=1e-12)
    rest = (OWNERS >= 4).nonzero().squeeze(1)
    found(IMAGES[4:], CAPTIONS[rest], NUMBERS[4:], NUMBERS[OWNERS[rest]])
    assert found.compute() == pytest.approx(expected("cosine", IMAGES, CAPTIONS, OWNERS), rel=1e-12)


def test_a_batch_may_reuse_the_memory_of_the_one_before() -> None:
    found = RetrievalRecall()
    images, captions, numbers = torch.empty(3, 4).double(), torch.empty(3, 4).double(), torch.empty(3).long()
    for start in range(0, 27, 3):
        owners = OWNERS[start : start + 3]
        images.copy_(IMAGES[owners])
        captions.copy_(CAPTIONS[start : start + 3])
        numbers.copy_(NUMBERS[owners])
        found.update(images, captions, numbers)
    assert found.compute() == pytest.approx(expected("cosine", IMAGES, CAPTIONS, OWNERS), rel=1e-12)


@pytest.mark.parametrize("kind", [torch.Tensor.numpy, torch.Tensor.tolist])
def test_arrays_and_lists_are_accepted(kind: Callable[[torch.Tensor], object]) -> None:
    found = RetrievalRecall()
    found.update(*map(kind, (IMAGES, CAPTIONS, NUMBERS, NUMBERS[OWNERS])))
    assert found.compute() == pytest.approx(expected("cosine", IMAGES, CAPTIONS, OWNERS), rel=1e-12)


def test_ties() -> None:
    same = torch.ones(6, 3)
    for ties, recall in (("pessimistic", 0.0), ("optimistic", 100.0)):
        assert RetrievalRecall(ties=ties)(same, same, torch.arange(6))["t2i_r1"] == recall


def test_the_example_runs() -> None:
    examples = doctest.DocTestFinder().find(RetrievalRecall, "RetrievalRecall", module=metric)
    assert doctest.DocTestRunner().run(examples[0]).failed == 0
    assert len(examples[0].examples) == 5


def test_what_is_refused() -> None:
    found = RetrievalRecall()
    with pytest.raises(ValueError, match=r"^compute: expected at least one image and caption; call update first$"):
        found.compute()
    with pytest.raises(ValueError, match=r"^image_ids: expected shape \(9,\), got \(3,\)$"):
        found.update(IMAGES, CAPTIONS, NUMBERS[:3], NUMBERS[OWNERS])
    with pytest.raises(ValueError, match=r"^caption_image_ids: expected shape \(27,\), got \(9,\)$"):
        found.update(IMAGES, CAPTIONS, NUMBERS)
    for ids in (NUMBERS / 2, ["a"] * 9):
        with pytest.raises(
            TypeError, match=r"^image_ids: expected (integers|a tensor, an array or a list of numbers), got"
        ):
            found.update(IMAGES, CAPTIONS, ids, NUMBERS[OWNERS])
    with pytest.raises(TypeError, match=r"^images: expected a tensor, an array or a list of numbers, got "):
        found.update([[1.0], [1.0, 2.0]], CAPTIONS, NUMBERS[:2])
    with pytest.raises(ValueError, match=r"^captions: expected shape \(n, 4\), got \(27, 3\)$"):
        found.update(IMAGES, CAPTIONS[:, :3], NUMBERS, NUMBERS[OWNERS])
    found.update(IMAGES[:1], CAPTIONS[:1], NUMBERS[:1], NUMBERS[1:2])
    with pytest.raises(ValueError, match=r"^compute: no embedding of image 3, to which a caption belongs$"):
        found.compute()
    before = RetrievalRecall()
    before.update(IMAGES, CAPTIONS[:9], NUMBERS)
    with pytest.raises(ValueError, match=r"^compute: no embedding of image 3, to which a caption belongs$"):
        before(IMAGES[:1], CAPTIONS[:1], NUMBERS[:1], NUMBERS[1:2])
    assert before.compute() == pytest.approx(expected("cosine", IMAGES, CAPTIONS[:9], torch.arange(9)), rel=1e-12)
    with pytest.raises(ValueError, match=r"^similarity: expected cosine or dot, got 'l2'$"):
        RetrievalRecall(similarity="l2")
    with pytest.raises(ValueError, match=r"^ties: expected pessimistic or optimistic, got 'any'$"):
        RetrievalRecall(ties="any")
