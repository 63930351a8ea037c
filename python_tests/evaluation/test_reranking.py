"""Re-ranked recalls equal those of a sorted list per query; pairs are scored once; the command and its errors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from itm_fast import models
from itm_fast.data import PrecomputedDataset
from itm_fast.evaluation import evaluate, rerank, score_matrix
from itm_fast.functional import recall_summary
from python_tests.evaluation.test_evaluation import Gallery, TableModel, random_table
from python_tests.helpers.commands import error, train_small
from python_tests.helpers.concepts import write_concepts
from python_tests.helpers.worlds import run_jobs


def rank(cheap: Sequence[float], exact: Sequence[float], own: set[int], k: int, pessimistic: bool) -> int:
    """Return the rank of the best of the items `own` in a re-ranked list; -1 without one."""

    def key(score: float) -> tuple[bool, float]:
        return (True, 0.0) if math.isnan(score) else (False, -score)

    def ahead(scores: Sequence[float], items: Sequence[int]) -> int:
        best = min(key(scores[item]) for item in items if item in own)
        others = [key(scores[item]) for item in items if item not in own]
        return sum(other < best or (pessimistic and other == best) for other in others)

    if not own:
        return -1
    order = sorted(range(len(cheap)), key=lambda item: (key(cheap[item]), item))
    if own & set(order[:k]):
        return ahead(exact, order[:k])
    return max(ahead(cheap, order), k)


def expected(cheap: Tensor, exact: Tensor, owners: list[int], k: int, ties: str = "pessimistic") -> dict[str, float]:
    pessimistic = ties == "pessimistic"
    of_images = [
        rank(row, other, {c for c, owner in enumerate(owners) if owner == image}, k, pessimistic)
        for image, (row, other) in enumerate(zip(cheap.tolist(), exact.tolist(), strict=True))
    ]
    of_captions = [
        rank(column, other, {owners[c]}, k, pessimistic)
        for c, (column, other) in enumerate(zip(cheap.t().tolist(), exact.t().tolist(), strict=True))
    ]
    return recall_summary(torch.tensor(of_images), torch.tensor(of_captions))


@given(data=st.data())
def test_ranks_are_those_of_sorted_lists(data: st.DataObject) -> None:
    """Few different scores, including NaN and infinity; captions in any order; tiles of any size."""
    n_images = data.draw(st.integers(1, 6))
    owners = data.draw(st.lists(st.integers(0, n_images - 1), min_size=1, max_size=12))
    values = st.sampled_from([0.0, 1.0, 2.0, float("nan"), float("inf"), -float("inf")])
    size = n_images * len(owners)
    tables = [
        torch.tensor(data.draw(st.lists(values, min_size=size, max_size=size))).view(n_images, len(owners))
        for _ in range(2)
    ]
    k, ties = data.draw(st.integers(1, 7)), data.draw(st.sampled_from(["pessimistic", "optimistic"]))
    sizes = {name: data.draw(st.integers(1, 8)) for name in ("tile_images", "tile_captions", "chunk_captions")}
    cheap, model = (TableModel(table) for table in tables)
    found, before = rerank(model, Gallery(owners, n_images), (cheap, Gallery(owners, n_images)), k, ties=ties, **sizes)
    assert found == expected(*tables, owners, k, ties)
    assert before == evaluate(cheap, Gallery(owners, n_images), ties=ties, streaming=True)
    assert sum(rows * columns for rows, columns in model.tiles) <= min(k * (n_images + len(owners)), size)


def test_folds_and_first_images() -> None:
    owners = [number // 3 for number in range(24)]
    tables = random_table(8, 24), random_table(8, 24).flip(1)
    for options, parts in (({"folds": 2}, [(0, 4), (4, 8)]), ({"first_images": 5}, [(0, 5)])):
        found, _ = rerank(
            TableModel(tables[1]), Gallery(owners, 8), (TableModel(tables[0]), Gallery(owners, 8)), 2, **options
        )
        wanted = [
            expected(
                *(one[first:last, 3 * first : 3 * last] for one in tables),
                [c // 3 for c in range(3 * (last - first))],
                2,
            )
            for first, last in parts
        ]
        assert found == {name: sum(one[name] for one in wanted) / len(wanted) for name in wanted[0]}


def test_with_all_candidates_the_recalls_are_those_of_the_model() -> None:
    owners = [number // 3 for number in range(24)]
    tables = random_table(8, 24), random_table(8, 24).flip(1)
    model = TableModel(tables[1])
    found, before = rerank(model, Gallery(owners, 8), (TableModel(tables[0]), Gallery(owners, 8)), 1000)
    whole = evaluate(TableModel(tables[1]), Gallery(owners, 8))
    assert found == {name: value for name, value in whole.items() if name != "mean_distance"}
    assert before != whole
    assert sum(rows * columns for rows, columns in model.tiles) == 8 * 24, "every pair is scored once"


class TextGallery(Gallery):
    def __init__(self, captions: list[str]) -> None:
        super().__init__([number // 2 for number in range(len(captions))], len(captions) // 2)
        self.captions = captions


def test_what_is_refused() -> None:
    model = TableModel(random_table(2, 4))
    mine = TextGallery(["a", "b", "c", "d"])
    with pytest.raises(ValueError, match=r"^k: expected at least 1 candidate per query, got 0$"):
        rerank(model, mine, (model, mine), 0)
    with pytest.raises(ValueError, match=r"^ties: expected one of 'pessimistic', 'optimistic', got 'some'"):
        rerank(model, mine, (model, mine), 1, ties="some")
    for other, found in (
        (TextGallery(["a", "b", "c", "e"]), r"2 images, 4 captions"),
        (Gallery([0, 1, 1, 1], 2), r"2 images, 4 captions"),
        (Gallery([0, 0, 1, 1], 3), r"3 images, 4 captions"),
    ):
        with pytest.raises(
            ValueError,
            match=r"^candidates: expected the 2 images and 4 captions that are re-ranked, in their order, got other "
            rf"ones \({found}\)$",
        ):
            rerank(model, mine, (model, other), 1)


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return runs of SCAN and VSE++, whose vocabulary has no `<mask>`."""
    folder = tmp_path_factory.mktemp("runs")
    scan = train_small(data, folder / "scan", "--text-augmentation", "0.1", "--lr", "0.01")
    return scan, train_small(data, folder / "vsepp", "--model", "vsepp")


def test_the_command(data: Path, runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Two models with different vocabularies, in one process and in two."""
    scan, vsepp = runs
    options = ["--data", data, "--rerank", "3", "--candidates", vsepp, "--candidates-data", data]
    jobs = [
        {
            "size": size,
            "arguments": [
                "evaluate",
                "--checkpoint",
                str(scan),
                *map(str, options),
                "--json",
                str(tmp_path / str(size)),
            ],
        }
        for size in (1, 2)
    ]
    (one,), two = run_jobs(jobs)
    assert (one[0], one[2]) == (0, "")
    assert two == [(0, one[1], ""), (0, "", "")]
    lines = one[1].splitlines()
    assert lines[:3] == [
        f"vocabulary: {scan / 'vocab.json'}", f"vocabulary: {vsepp / 'vocab.json'}", "test, 10 images"
    ]  # fmt: skip
    assert [line.split("  ")[0] for line in lines[5:7]] == [f"{vsepp}, all", f"{scan}, first 3"]
    results = [json.loads((tmp_path / str(size)).read_text()) for size in (1, 2)]
    before = [result.pop("candidates") for result in results]
    for result in results:
        assert result.pop("seconds") > 0
    intervals = [result.pop("intervals") for result in results]
    assert {name: pytest.approx(ends) for name, ends in intervals[0].items()} == intervals[1]
    assert [result.pop("bootstrap") for result in results] == [{"samples": 1000, "seed": 0}] * 2
    assert results[1] == pytest.approx(results[0])
    assert before[1] == pytest.approx(before[0])
    assert (results[0]["rerank"], results[0]["checkpoint"], before[0]["checkpoint"]) == (3, str(scan), str(vsepp))
    loaded = [models.load(run) for run in (vsepp, scan)]
    tables = [score_matrix(model, PrecomputedDataset(data, "test", model.tokenizer)) for model in loaded]
    wanted = expected(*tables, [caption // 5 for caption in range(50)], 3)
    assert {name: results[0][name] for name in wanted} == pytest.approx(wanted)
    assert results[0]["rsum"] != before[0]["rsum"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rerank", "3"], "--rerank: expected with --candidates RUN, which says which candidates to score"),
        (["--candidates", "SCAN"], "--candidates: expected with --rerank K, which says how many to score"),
        (["--candidates-data", "OTHER"], "--candidates-data: expected with --candidates RUN and --rerank K"),
        (["--rerank", "0", "--candidates", "SCAN"], "--rerank: expected at least 1 candidate per query, got 0"),
        (["--rerank", "3", "--candidates", "SCAN", "--checkpoint", "SCAN"],
         "--rerank: expected one --checkpoint, got 2"),
        (["--rerank", "3", "--candidates", "nowhere"],
         "nowhere/config.json: no such file; nowhere is not a saved model"),
        (["--rerank", "3", "--candidates", "SCAN", "--candidates-data", "OTHER"],
         "candidates: expected the 10 images and 50 captions that are re-ranked, in their order, got other ones "
         "(10 images, 50 captions)"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(
    data: Path, runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str],
    message: str,
) -> None:  # fmt: skip
    if "OTHER" in options:
        write_concepts(tmp_path / "other", seed=1)
    filled = {"SCAN": str(runs[1]), "OTHER": str(tmp_path / "other")}
    given = [filled.get(one, one) for one in options]
    assert error(capsys, "evaluate", "--checkpoint", runs[0], "--data", data, *given) == (1, message)
