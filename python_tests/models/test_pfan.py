"""PFAN against float64 loops over one region and one pair at a time, and its boxes from data to index."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from itm_fast import models
from itm_fast.data import CaptionDataset, StoreDataset, open_split, pack
from itm_fast.fragments import Fragments
from itm_fast.nn.position_encoder import box_blocks
from itm_fast.training.fingerprint import fingerprints
from python_tests.helpers.commands import error
from python_tests.helpers.concepts import with_boxes
from python_tests.helpers.runs import config, make_trainer

SIZES = {"vocab_size": 23, "feature_dim": 10, "embed_dim": 12, "word_dim": 7}
POSITIONS = {"position_grid": 4, "position_blocks": 5, "position_dim": 6}
IDS = torch.tensor([[1, 5, 2, 9], [4, 2, 0, 0], [7, 0, 0, 0], [3, 8, 8, 1]])
LENGTHS = torch.tensor([4, 2, 1, 3])


def boxes_of(n: int, seed: int = 0) -> np.ndarray:
    """Make n boxes (n, 4) float32 with corners in order."""
    corners = np.random.default_rng(seed).uniform(size=(n, 2, 2)).astype(np.float32)
    return np.sort(corners, axis=1).reshape(n, 4)


def softmax(values: list[Tensor]) -> list[Tensor]:
    powers = [value.exp() for value in values]
    return [power / sum(powers) for power in powers]


def blocks_of(box: list[float], grid: int, blocks: int) -> list[tuple[int, float]]:
    """Return numbers and overlaps of the blocks of a box: the area of each intersection, in areas of a block."""
    left, top, right, bottom = box
    found = []
    for row in range(grid):
        for column in range(grid):
            across = min(right, (column + 1) / grid) - max(left, column / grid)
            down = min(bottom, (row + 1) / grid) - max(top, row / grid)
            if across > 0 and down > 0:
                found.append((row * grid + column, across * down * grid * grid))
    found.sort(key=lambda one: (-round(one[1], 5), one[0]))
    return (found + blocks * [(grid * grid, 0.0)])[:blocks]


def region(model: models.PFAN, row: Tensor, box: list[float]) -> Tensor:
    encoder = model.image_encoder
    numbers, overlaps = zip(*blocks_of(box, encoder.grid, encoder.blocks), strict=True)
    query = encoder.query.weight @ row + encoder.query.bias
    vectors = [encoder.positions.weight[number] for number in numbers]
    relevance = softmax([torch.tanh(query @ vector) for vector in vectors])
    shares = softmax([overlap * one for overlap, one in zip(overlaps, relevance, strict=True)])
    position = sum(share * vector for share, vector in zip(shares, vectors, strict=True))
    embedded = encoder.fc.weight @ torch.cat([row, position]) + encoder.fc.bias
    return embedded / (embedded.square().sum().sqrt() + 1e-8)


def pair_score(words: Tensor, regions: Tensor, peak_weight: float) -> Tensor:
    raw = [[x @ w if x @ w > 0 else 0.1 * (x @ w) for x in regions] for w in words]
    norms = [sum(row[k] ** 2 for row in raw).sqrt() + 1e-8 for k in range(len(regions))]
    scores = []
    for word, row in zip(words, raw, strict=True):
        shares = softmax([9 * s / norm for s, norm in zip(row, norms, strict=True)])
        attended = sum(share * x for share, x in zip(shares, regions, strict=True))
        cosine = word @ attended / (word.square().sum().sqrt() * attended.square().sum().sqrt())
        scores.append(cosine + peak_weight * max(shares))
    return sum(scores) / len(scores)


@pytest.mark.parametrize("peak", [None, 0.0, 0.25])
def test_scores_and_gradients_equal_the_definition(peak: float | None) -> None:
    torch.manual_seed(0)
    model = models.create("pfan", **SIZES, **POSITIONS, peak_weight=peak)
    exact = models.create("pfan", **SIZES, **POSITIONS, peak_weight=peak).double()
    exact.load_state_dict(model.state_dict())
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(9, 10, generator=random)
    boxes = boxes_of(9)
    boxes[0] = 0, 0, 1, 1  # More blocks of equal overlap than are used.
    boxes[1] = 0.3, 0.3, 0.31, 0.32  # A single block.
    offsets = torch.tensor([0, 5, 7, 8, 9])
    features = Fragments(torch.cat([rows, torch.from_numpy(boxes)], dim=1), offsets)
    regions = [region(exact, row, box) for row, box in zip(rows.double(), boxes.tolist(), strict=True)]
    captions = exact.encode_captions(IDS, LENGTHS)
    weight = 0.5 if peak is None else peak
    images = [torch.stack(regions[first:last]) for first, last in itertools.pairwise(offsets)]
    expected = torch.stack([
        torch.stack([pair_score(captions[j], image, weight) for j in range(4)]) for image in images
    ])  # fmt: skip
    scores = model(features, IDS, LENGTHS)
    assert scores.dtype == torch.float32
    assert float(expected.detach().std()) > 0.05
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=2e-5)

    factor = torch.randn(4, 4, generator=random).double()
    found = torch.autograd.grad((exact(features.to(torch.float64), IDS, LENGTHS) * factor).sum(), exact.parameters())
    wanted = torch.autograd.grad((expected * factor).sum(), exact.parameters())
    for (name, _), ours, theirs in zip(exact.named_parameters(), found, wanted, strict=True):
        assert float(theirs.abs().max()) > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8, msg=name)
    assert model.scores_within_one is (weight == 0)
    assert (model.attention_scores is None) is (weight > 0)


def test_blocks_of_a_box() -> None:
    """The upper left quarter and a strip of half a block, of a grid of 2 by 2 and of 4 by 4."""
    numbers, overlaps = box_blocks(torch.tensor([[0.0, 0.0, 0.5, 0.5]]), 2, 3)
    assert (numbers.tolist(), overlaps.tolist()) == ([[0, 4, 4]], [[1.0, 0.0, 0.0]])
    numbers, overlaps = box_blocks(torch.tensor([[0.25, 0.75, 1.0, 0.875]]), 4, 2)
    assert (numbers.tolist(), overlaps.tolist()) == ([[13, 14]], [[0.5, 0.5]])


def test_settings_that_do_not_fit() -> None:
    for options, message in (
        ({"image_encoder": "residual"},
         "image_encoder: regions with boxes pass a linear layer; expected linear, got residual"),
        ({"position_grid": 3, "position_blocks": 10},
         "position_blocks: expected at most 9, the blocks of a picture, got 10"),
        ({"peak_weight": 0.5, "regulator": "rar"},
         "peak_weight: 0.5 goes with direction t2i and no regulator; expected 0"),
        ({"peak_weight": 0.5, "normalization": "no_norm"},
         "peak_weight: 0.5 goes with normalization clipped_l2norm and no focal; expected 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^[^\n]+$") as refused:
            models.create("pfan", **SIZES, **options)
        assert str(refused.value) == message
    model = models.create("pfan", **SIZES, regulator="rcar")
    assert (model.peak, model.score(*models_input(model)).shape) == (None, (2, 4))
    with pytest.raises(
        ValueError, match=r"^features: expected 10 values per region and four of its box, got 10; pass dataset\."
    ):
        model.encode_images(torch.zeros(1, 2, 10))
    with pytest.raises(ValueError, match=r"^features: expected 14 values per region, got 13$"):
        model.encode_images(torch.zeros(1, 2, 13))


def models_input(model: models.PFAN) -> tuple[Fragments, Fragments]:
    rows = torch.cat([torch.randn(2, 3, 10), torch.from_numpy(boxes_of(6)).view(2, 3, 4)], dim=2)
    return model.encode_images(rows), model.encode_captions(IDS, LENGTHS)


def test_a_position_helps_where_features_are_equal() -> None:
    """Two regions with the same features differ by their boxes alone."""
    torch.manual_seed(0)
    model = models.create("pfan", **SIZES)
    rows = torch.randn(1, 1, 10).expand(1, 2, 10)
    boxes = torch.tensor([[[0.0, 0.0, 0.4, 0.4], [0.6, 0.6, 1.0, 1.0]]])
    regions = model.encode_images(torch.cat([rows, boxes], dim=2)).values
    assert float((regions[0] - regions[1]).detach().norm()) > 0.01


@pytest.fixture
def located(data: Path, tmp_path: Path) -> Path:
    """The concepts data with boxes."""
    return with_boxes(data, tmp_path / "located")


def test_batches_have_the_boxes_of_their_regions(located: Path, tmp_path: Path) -> None:
    settings = config(located, tmp_path / "run", model="pfan", region_augmentation=0.3)
    trainer = make_trainer(settings)
    data = trainer.train_data
    plain = open_split(located, "train", data.vocabulary)
    images = data.image_batch([3, 1])
    assert torch.equal(images[..., :-4], plain.image_batch([3, 1]))
    assert torch.equal(images[..., -4:], plain.boxes([3, 1]))
    assert torch.equal(data.region_batch([3, 1]), plain.image_batch([3, 1]))
    assert fingerprints(data).keys() - fingerprints(plain).keys() == {"train_boxes.npy"}
    pack(located, tmp_path / "store", dtype="fp16")
    store = StoreDataset(tmp_path / "store", "train", data.vocabulary)
    store.read_boxes()
    assert torch.equal(store.image_batch([3, 1])[..., -4:], images[..., -4:])
    assert store.image_batch([3]).dtype == torch.float32
    # Augmentation keeps regions and boxes together.
    batch = trainer.stepper.augmentation(data.batch([0, 7]))
    whole = data.image_batch(batch.image_index)
    kept = [{tuple(row) for row in batch.features[index].tolist()} for index in (0, 1)]
    assert all(kept[index] <= {tuple(row) for row in whole[index].tolist()} for index in (0, 1))


def test_data_without_boxes_are_refused(
    data: Path, located: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("train", "--data", data, "--model", "pfan", "--out", tmp_path / "run")
    message = (
        f"{data}/train_ims.npy: the model reads the boxes of the regions, but there are none; write train_boxes.npy, "
        "(images, regions, 4) shares of the picture's sides"
    )
    assert error(capsys, *command) == (1, message)
    pack(data, tmp_path / "store", dtype="fp16")
    vocabulary = make_trainer(config(located, tmp_path / "r")).train_data.vocabulary
    with pytest.raises(ValueError, match=r"into the data folder, and pack it again$"):
        StoreDataset(tmp_path / "store", "dev", vocabulary).read_boxes()
    with pytest.raises(ValueError, match=r"but there are none; pass them as boxes$"):
        CaptionDataset(np.zeros((1, 2, 3), np.float32), ["red"], [0], vocabulary).read_boxes()
