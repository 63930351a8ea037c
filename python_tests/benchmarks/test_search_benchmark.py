"""The benchmarks of searches: MUVERA's encoding in loops, recalls by sorting, synthetic images, and tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import search, search_columns, search_engines, search_images, search_pooling
from itm_fast.fragments import Fragments
from itm_fast.search import Index
from python_tests.helpers.processes import ROOT
from python_tests.helpers.search import concepts, scan

RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("queries", [True, False])
def test_the_fixed_encoding_sums_or_averages_each_cell(queries: bool) -> None:
    torch.manual_seed(0)
    sets = Fragments(torch.randn(9, 5), torch.tensor([0, 4, 9]))
    found = search_pooling.fixed_encoding(sets, 2, 2, 3, queries=queries)
    generator = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(2):
        planes = torch.randn(5, 2, generator=generator)
        signs = torch.randint(0, 2, (5, 3), generator=generator) * 2.0 - 1
        rows = []
        for number in range(2):
            cells: dict[int, list[torch.Tensor]] = {}
            for row in sets[number]:
                cell = sum(2**bit for bit in range(2) if float(row @ planes[:, bit]) > 0)
                cells.setdefault(cell, []).append(row @ signs / 3**0.5)
            for cell in range(4):
                if queries:
                    rows.append(sum(cells.get(cell, []), torch.zeros(3)))
                else:
                    nearest = min(cells, key=lambda other: ((cell ^ other).bit_count(), other))
                    rows.append(torch.stack(cells[nearest]).mean(0))
        parts.append(torch.stack(rows).view(2, 12))
    torch.testing.assert_close(found, torch.cat(parts, 1))


def test_recalls_count_the_best_among_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_pooling, "CANDIDATES", (1, 3, 8))
    torch.manual_seed(0)
    products, scores = torch.randn(4, 8), torch.randn(4, 8)
    best = scores.topk(2).indices
    shares = []
    for count in (1, 3, 8):
        pairs = zip(best.tolist(), products.topk(count).indices.tolist(), strict=True)
        shares.append(np.mean([len({*row} & {*near}) / 2 for row, near in pairs]))
    assert search_pooling.recalls(products, best) == pytest.approx(shares)


def test_the_exact_product_finds_the_nearest(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_engines, "TOP", 12)
    monkeypatch.setattr(search_engines, "texts_of", lambda _index, _count: ["red ball dog", "blue dog"])
    index = Index.build(scan(), concepts(data), tmp_path / "index", pooling="mean")
    search_engines.write_arrays(index, tmp_path, 2, 2)
    best, images = np.load(tmp_path / "best.npy"), np.load(tmp_path / "vectors.npy")
    (expected,) = index.search("blue dog", 10, exact=True)
    assert [f"train{place}" for place in best[1]] == [hit.item.id for hit in expected.hits]
    built = search_engines.measure("torch", tmp_path, tmp_path, "build")
    assert built["disk_bytes"] > images.size * 2
    found = search_engines.measure("torch", tmp_path, tmp_path, "search")["efforts"]
    near = np.argsort(-(np.load(tmp_path / "queries.npy") @ images.T), axis=1)[:, :12]
    share = np.mean([place in row for row, places in zip(near, best, strict=True) for place in places])
    assert [one["best_found"] for one in found] == pytest.approx([share] * 3)
    assert 0 < share < 1


def test_the_least_effort_that_is_good_enough_is_reported() -> None:
    efforts = [{"best_found": share} for share in (0.7, 0.895, 0.95)]
    assert search_engines.good_enough(efforts, 0.9) == efforts[1]
    assert search_engines.good_enough(efforts, 0.99) == efforts[2]


def test_synthetic_images_have_the_mean_and_covariance_of_real_ones() -> None:
    """The rows of 3 regions vary along two directions of the whole picture, and one channel has noise of its own."""
    torch.manual_seed(0)
    directions, mean = torch.randn(2, 12), 3 + torch.rand(12)
    rows = mean + 0.3 * torch.randn(4000, 2) @ directions
    rows[:, 5] += 0.2 * torch.randn(4000)
    model = search_images.ImageModel(Fragments.from_padded(rows.view(4000, 3, 4)), components=2)
    assert 0.9 < model.explained < 1
    model._normal = lambda drawn: drawn.view(len(drawn), 3, 4)  # type: ignore[method-assign]
    drawn = torch.cat([part.values.view(-1, 12) for part in model.drawn(6000, seed=1)])
    assert len(drawn) == 6000
    torch.testing.assert_close(drawn.mean(0), rows.mean(0), atol=0.05, rtol=0)
    difference = np.cov(drawn.numpy().T) - np.cov(rows.numpy().T)
    assert np.abs(difference).max() < 0.1 * np.abs(np.cov(rows.numpy().T)).max()
    (few,) = search_images.ImageModel(Fragments.from_padded(rows.view(4000, 3, 4)), 2).drawn(7, seed=1)
    torch.testing.assert_close(few.values.norm(dim=1), torch.ones(21))


def test_a_shortlist_is_longer_than_the_candidates_chosen_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_pooling, "CANDIDATES", (1, 2))
    monkeypatch.setattr(search_pooling, "SHORTLIST", 8)
    torch.manual_seed(0)
    products, blended = torch.randn(40, 50), torch.randn(40, 50)
    best = torch.randint(50, (40, 2))

    def expected(length: int) -> list[float]:
        shares = []
        for count in (1, 2):
            found = 0
            for row in range(40):
                near = sorted(range(50), key=lambda one: -float(products[row, one]))[: length * count]
                chosen = sorted(near, key=lambda one: -float(blended[row, one]))[:count]
                found += sum(one in chosen for one in best[row].tolist())
            shares.append(found / 80)
        return shares

    assert search_pooling.shortlist_recalls(products, blended, best) == pytest.approx(expected(8))
    assert expected(8) != expected(20)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_embeddings_of_candidates_are_read_from_each_store(data: Path, tmp_path: Path, dtype: str) -> None:
    index = Index.build(scan(), concepts(data), tmp_path / "index", pooling="mean", dtype=dtype)
    side = index.snapshot.sides["images"]
    asked: list[torch.Tensor] = []

    def shifted(positions: torch.Tensor) -> Fragments:
        asked.append(positions)
        rows = side.encodings(positions)[0]
        return rows.with_values(rows.values + 0.25)

    stores = {"index": lambda positions: side.encodings(positions)[0], "other": shifted}
    found = search_columns.compared(index, stores, ["red ball dog", "blue dog"])
    assert found["largest_difference"] == pytest.approx(0.25)
    assert len(asked) == 4, "two rounds of two captions"
    assert {*found["seconds"]} == {"index", "other", "scoring"}
    assert all(0 < times["wall_p50"] <= times["wall_p99"] for times in found["seconds"].values())


@pytest.mark.parametrize("module", [search, search_columns, search_engines, search_pooling])
def test_the_tables_have_a_row_for_each_measurement(module: object) -> None:
    name = module.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    results = json.loads((RESULTS / f"{name}.json").read_text())
    measured = next(results[key] for key in ("cases", "forms", "seconds") if key in results)
    if name == "search_engines":
        measured = [engine for case in measured for engine in case["engines"]]
    assert module.markdown(results).split("\n\n")[0].count("\n") == len(measured) + 1  # type: ignore[attr-defined]
