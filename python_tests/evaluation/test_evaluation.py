"""Evaluation: tiles, folds, the model's state, and the table."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import itm_fast.functional as F_itm
from itm_fast import Fragments, models
from itm_fast.data import PrecomputedDataset, Vocabulary
from itm_fast.evaluation import (
    evaluate,
    evaluate_ensemble,
    evaluate_scores,
    protocols,
    recall_table,
    score_matrix,
    scoring,
)
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.terminal import every_step


class Gallery:
    """Images are numbers, captions the numbers of their images, in any order and number."""

    def __init__(self, caption_image: list[int], n_images: int) -> None:
        self.caption_image = torch.tensor(caption_image, dtype=torch.int64)
        self.n_images = n_images
        self.image_batches: list[list[int]] = []
        self.caption_batches: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.caption_image)

    def image_batch(self, image_indices: Tensor) -> Tensor:
        self.image_batches.append(image_indices.tolist())
        return image_indices.float().reshape(-1, 1, 1)

    def caption_batch(self, caption_indices: Tensor) -> tuple[Tensor, Tensor]:
        self.caption_batches.append(caption_indices.tolist())
        return caption_indices[:, None], torch.ones(len(caption_indices), dtype=torch.int64)


class TableModel(nn.Module):
    """Look up scores in a table and check how the model is used."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.frozen = nn.Dropout()
        self.tiles: list[tuple[int, int]] = []

    def encode_images(self, features: Tensor) -> Fragments:
        assert not self.training
        assert not torch.is_grad_enabled()
        return Fragments.from_padded(features)

    def encode_captions(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        return token_ids

    def score(self, images: Fragments, captions: Tensor) -> Tensor:
        self.tiles.append((len(images), len(captions)))
        return self.table[images.values[:, 0].long()][:, captions[:, 0]]


def random_table(n_images: int, n_captions: int) -> Tensor:
    return torch.randn(n_images, n_captions, generator=torch.Generator().manual_seed(0))


def expected_summary(table: Tensor, owner: Tensor) -> dict[str, object]:
    """Return the recalls of the ranks and the mean distance in Python floats; an image may have no captions."""
    pairs = [(owner[c] == i, score) for i, row in enumerate(table.tolist()) for c, score in enumerate(row)]
    own, other = ([score for positive, score in pairs if bool(positive) is kind] for kind in (True, False))
    distance = math.fsum(own) / len(own) - math.fsum(other) / len(other)
    recalls = F_itm.recall_summary(*F_itm.retrieval_ranks(table, owner))
    return {**recalls, "mean_distance": pytest.approx(distance, rel=1e-12, abs=1e-12)}


def test_tiles_make_up_the_whole_matrix() -> None:
    table = random_table(7, 11)
    for dtype in (torch.float32, torch.float64):
        for tile_images, tile_captions in ((256, 512), (3, 4), (1, 11), (7, 1)):
            gallery, model = Gallery([0] * 11, 7), TableModel(table.to(dtype))
            scores = score_matrix(model, gallery, tile_images=tile_images, tile_captions=tile_captions)
            assert scores.dtype == dtype
            assert torch.equal(scores, table.to(dtype))
            assert not scores.requires_grad
            # Everything is encoded once, and no tile is larger than asked for.
            assert [i for batch in gallery.image_batches for i in batch] == list(range(7))
            assert [c for batch in gallery.caption_batches for c in batch] == list(range(11))
            assert all(rows <= tile_images and columns <= tile_captions for rows, columns in model.tiles)
            assert sum(rows * columns for rows, columns in model.tiles) == 77


def test_chosen_images_and_captions_in_any_order() -> None:
    table = random_table(7, 11)
    images, captions = torch.tensor([6, 0, 3]), torch.tensor([9, 2, 2, 5])
    scores = score_matrix(TableModel(table), Gallery([0] * 11, 7), images=images, captions=captions, tile_captions=3)
    assert torch.equal(scores, table[images][:, captions])
    none = score_matrix(TableModel(table), Gallery([0] * 11, 7), images=torch.tensor([], dtype=torch.int64))
    assert none.shape == (0, 11)


def test_the_model_is_left_as_it_was_even_after_an_error() -> None:
    model = TableModel(random_table(2, 3)).train()
    model.frozen.eval()
    score_matrix(model, Gallery([0] * 3, 2))
    assert (model.training, model.frozen.training, torch.is_grad_enabled()) == (True, False, True)
    model.score = lambda images, captions: 1 / 0
    with pytest.raises(ZeroDivisionError):
        score_matrix(model, Gallery([0] * 3, 2))
    assert (model.training, model.frozen.training, torch.is_grad_enabled()) == (True, False, True)


def test_progress_counts_every_tile_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def scored(progress: bool) -> None:
        gallery = Gallery([0, 0, 1, 1, 2, 3], 4)
        evaluate(TableModel(random_table(4, 6)), gallery, folds=2, tile_images=1, progress=progress, description="dev")

    scored(progress=True)
    assert capsys.readouterr().err == ""
    terminal = every_step(monkeypatch, scoring)
    scored(progress=False)
    assert terminal.getvalue() == ""
    scored(progress=True)
    # In a fold two images, one tile of captions, and two tiles of scores.
    for fold in (1, 2):
        assert re.search(rf"dev, fold {fold}/2: 100%[^\r]* 5/5 ", terminal.getvalue())
    assert terminal.getvalue().rpartition("5/5")[2].rstrip("\r").endswith(" ")


def test_one_fold_is_the_summary_of_the_ranks() -> None:
    table, owner = random_table(6, 20), [5, 0, 3, 3, 1] * 4
    expected = expected_summary(table, torch.tensor(owner))
    assert evaluate_scores(table, torch.tensor(owner)) == expected
    assert evaluate(TableModel(table), Gallery(owner, 6), tile_images=4, tile_captions=7) == expected


@pytest.mark.parametrize("owner", [[i // 5 for i in range(60)], [(7 * i) % 12 for i in range(60)]])
def test_folds_are_means_over_runs_of_images_with_their_own_captions(owner: list[int]) -> None:
    table, owners = random_table(12, 60), torch.tensor(owner)
    summaries = []
    for first in (0, 4, 8):
        inside = [c for c in range(60) if first <= owner[c] < first + 4]
        summaries.append(expected_summary(table[first : first + 4][:, inside], owners[inside] - first))
        summaries[-1]["mean_distance"] = summaries[-1]["mean_distance"].expected
    expected = {key: pytest.approx(sum(s[key] for s in summaries) / 3) for key in summaries[0]}
    assert evaluate_scores(table, owners, folds=3) == expected
    model = TableModel(table)
    assert evaluate(model, Gallery(owner, 12), folds=3) == expected
    assert sum(rows * columns for rows, columns in model.tiles) == 12 * 60 / 3  # only pairs within a fold
    assert expected != evaluate_scores(table, owners)


def test_the_first_images_alone() -> None:
    table, owners = random_table(12, 60), torch.arange(60) // 5
    expected = evaluate_scores(table[:4, :20], owners[:20])
    assert evaluate_scores(table, owners, first_images=4) == expected
    assert evaluate(TableModel(table), Gallery(owners.tolist(), 12), first_images=4) == expected
    halves = evaluate_scores(table, owners, first_images=8, folds=2)
    assert halves == evaluate_scores(table[:8, :40], owners[:40], folds=2)


def test_scores_and_owners_may_be_arrays_or_lists() -> None:
    table, owners = random_table(6, 20), torch.tensor([5, 0, 3, 3, 1] * 4)
    expected = evaluate_scores(table, owners)
    assert evaluate_scores(table.numpy(), owners.numpy().astype(np.uint16)) == expected
    assert evaluate_scores(table.numpy().astype(">f4"), owners.numpy().astype(">i2")) == expected
    assert evaluate_scores(table.tolist(), owners.tolist()) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluate_scores(table.clone().requires_grad_(), owners) == expected
    with pytest.raises(TypeError, match=r"^caption_image: expected integers, got torch.float64$"):
        evaluate_scores(table, owners.numpy() / 5)
    with pytest.raises(TypeError, match=r"^scores: expected a tensor, an array or a list of numbers, got "):
        evaluate_scores([[1.0], [1.0, 2.0]], owners)
    with pytest.raises(ValueError, match=r"^scores: expected shape \(n_images, n_captions\), got a float32 tensor"):
        evaluate_scores(table[0], owners)


def test_ties_are_passed_on() -> None:
    table, owners = torch.zeros(4, 20), torch.arange(20) // 5
    assert evaluate_scores(table, owners)["rsum"] == 200.0  # rank 3 of 4 images, rank 15 of 20 captions
    assert evaluate_scores(table, owners, ties="optimistic")["rsum"] == 600.0
    assert evaluate(TableModel(table), Gallery(owners.tolist(), 4), ties="optimistic")["rsum"] == 600.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 5}, "folds: expected a divisor of the number of images, 12, got 5"),
        ({"folds": 0}, "folds: expected a divisor of the number of images, 12, got 0"),
        ({"first_images": 13}, "first_images: expected 1 to 12, the number of images, got 13"),
        ({"first_images": 0}, "first_images: expected 1 to 12, the number of images, got 0"),
        ({"ties": "some"}, "ties: expected one of 'pessimistic', 'optimistic', got 'some'"),
        ({"folds": 12}, "image_to_text: expected at least one rank of 0 or more"),
    ],
)
def test_bad_protocols(options: dict, message: str) -> None:
    table, owners = random_table(12, 60), torch.arange(60) // 6
    with pytest.raises(ValueError, match=message):
        evaluate_scores(table, owners, **options)
    with pytest.raises(ValueError, match=message):
        evaluate(TableModel(table), Gallery(owners.tolist(), 12), **options)


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        (torch.arange(25) // 5 + 1, "caption_image: expected images from 0 to 4, got 5 for caption 20"),
        (torch.arange(25) // 5 - 1, "caption_image: expected images from 0 to 4, got -1 for caption 0"),
        (torch.arange(20) // 5, "caption_image: expected shape (25,) as many as scores has columns, got (20,)"),
        (torch.arange(30) // 6, "caption_image: expected shape (25,) as many as scores has columns, got (30,)"),
    ],
)
def test_owners_that_do_not_fit_the_scores(owners: Tensor, message: str) -> None:
    table = torch.eye(5).repeat_interleave(5, 1)
    for chosen in ({}, {"first_images": 4}):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            evaluate_scores(table, owners, **chosen)


def test_owners_outside_the_images_of_a_data_set() -> None:
    with pytest.raises(ValueError, match=r"^caption_image: expected images from 0 to 1, got 2 for caption 1$"):
        evaluate(TableModel(random_table(2, 2)), Gallery([1, 2], 2), first_images=1)


def test_bad_tiles() -> None:
    for name in ("tile_images", "tile_captions"):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
            score_matrix(TableModel(random_table(2, 2)), Gallery([0, 1], 2), **{name: 0})


def test_a_real_model_scores_the_same_in_tiles_and_at_once(tmp_path: Path) -> None:
    write_concepts(tmp_path)
    captions = (tmp_path / "train_caps.txt").read_text().splitlines()
    dataset = PrecomputedDataset(tmp_path, "test", Vocabulary.build(captions, min_count=1))
    torch.manual_seed(0)
    model = models.create("scan", vocab_size=len(dataset.vocabulary), feature_dim=8, embed_dim=16, word_dim=12)
    tiled = score_matrix(model, dataset, tile_images=3, tile_captions=7)
    model.eval()
    with torch.no_grad():
        at_once = model(dataset.image_batch(range(10)), *dataset.caption_batch(range(50)))
    torch.testing.assert_close(tiled, at_once, rtol=1e-5, atol=1e-6)
    expected = expected_summary(tiled, dataset.caption_image)
    assert evaluate(model, dataset, tile_images=3, tile_captions=7) == expected


@pytest.mark.parametrize("chosen", [{}, {"first_images": 5}, {"folds": 2}])
def test_the_mean_distance_comes_with_the_scoring(chosen: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not depend on the tiles, and scores are computed once; a complete matrix gives the same."""
    owner = [(7 * i) % 8 for i in range(37)]
    table = random_table(8, 37)
    values = []
    for tile_images, tile_captions in ((256, 512), (3, 5), (1, 1)):
        model = TableModel(table)
        options = {"tile_images": tile_images, "tile_captions": tile_captions, **chosen}
        values.append(evaluate(model, Gallery(owner, 8), **options)["mean_distance"])
        pairs = {"first_images": 5 * sum(o < 5 for o in owner), "folds": 4 * 37}
        assert sum(rows * columns for rows, columns in model.tiles) == pairs.get(next(iter(chosen), ""), 8 * 37)
    monkeypatch.setattr(protocols, "_ROWS", 3)
    values.append(evaluate_scores(table, torch.tensor(owner), **chosen)["mean_distance"])
    assert values == pytest.approx([values[0]] * 4, rel=1e-12)
    if not chosen:
        assert values[0] == expected_summary(table, torch.tensor(owner))["mean_distance"]


def test_no_mean_distance_without_positives_negatives_or_numbers() -> None:
    owners = torch.tensor([0, 0, 1])
    assert evaluate_scores(torch.tensor([[1.0, 0.5, 0.0], [0.25, 0.0, 1.0]]), owners)["mean_distance"] == (
        pytest.approx(2.5 / 3 - 0.25 / 3)
    )
    assert "mean_distance" not in evaluate_scores(torch.randn(1, 3), torch.zeros(3, dtype=torch.int64))
    for wrong in (math.nan, math.inf):
        table = torch.tensor([[1.0, wrong, 0.0], [0.0, 0.0, 1.0]])
        assert "mean_distance" not in evaluate_scores(table, owners)
        assert "mean_distance" not in evaluate(TableModel(table), Gallery([0, 0, 1], 2))
        both = [(TableModel(one), Gallery([0, 0, 1], 2)) for one in (table, torch.ones(2, 3))]
        alone, together = evaluate_ensemble(both)
        assert ["mean_distance" in summary for summary in (*alone, together)] == [False, True, False]


def test_the_table() -> None:
    best = evaluate_scores(torch.eye(10).repeat_interleave(5, 1), torch.arange(50) // 5)
    worst = evaluate_scores(-torch.eye(10).repeat_interleave(5, 1), torch.arange(50) // 5)
    lines = recall_table({"trained": best, "no": worst}).splitlines()
    assert [line.split() for line in lines] == [
        ["image", "to", "text", "text", "to", "image"],
        [*["R@1", "R@5", "R@10", "Med", "r", "Mean", "r"] * 2, "rsum", "MD"],
        ["trained", *["100.0", "100.0", "100.0", "1.0", "1.0"] * 2, "600.0", "1.00"],
        ["no", "0.0", "0.0", "0.0", "46.0", "46.0", "0.0", "0.0", "100.0", "10.0", "10.0", "100.0", "-1.00"],
    ]
    del best["mean_distance"]
    partly = recall_table({"trained": best, "no": worst}).splitlines()
    assert partly[2] == lines[2][:-4] + " " * 4
    assert partly[3] == lines[3]
    del worst["mean_distance"]
    assert recall_table({"trained": best, "no": worst}).splitlines()[1] == lines[1][:-8]
    assert len({len(line) for line in lines}) == 1
    for distance, cell in (
        (999.99, "999.99"), (-1234.56, "-1235"), (-123456.7, "-1.235e+05"), (2.5e30, "2.5e+30"),
    ):  # fmt: skip
        rows = recall_table({"trained": {**best, "mean_distance": distance, "t2i_meanr": 123456789.0}, "no": worst})
        long = rows.splitlines()
        assert long[2].split() == ["trained", *["100.0"] * 3, "1.0", "1.0", *["100.0"] * 3, "1.0", "123456789.0",
                                   "600.0", cell]  # fmt: skip
        assert len({len(line) for line in long}) == 1
    # Numbers end where the titles above them end.
    assert lines[1].index("R@1") + 3 == lines[2].index("100.0") + 5


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("data", r"^dataset: expected a data set, got 'data', which has no n_images; open a folder with itm_fast.data"),
        (torch.nn.Linear(1, 1), r"^dataset: expected a data set, got <Linear>, which has no n_images$"),
    ],
)
@pytest.mark.parametrize("compute", [evaluate, score_matrix])
def test_something_else_than_a_data_set_is_refused(compute: Callable[..., Any], dataset: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        compute(torch.nn.Linear(1, 1), dataset)
