"""The benchmark of pairs a second: it scores with every model, and its table has the numbers of the file."""

from __future__ import annotations

from benchmarks.matching_speed import RECIPES, markdown, run

SMALL = {"embed_dim": 16, "word_dim": 8}


def test_every_model_is_measured_at_its_recipe() -> None:
    seen: list[str] = []
    results = run(pairs=3, features=8, words=20, options=SMALL, progress=seen.append)
    assert results["pairs"] == 9
    assert list(results["models"]) == list(RECIPES)
    assert {row["recipe"] for row in results["models"].values()} == set(RECIPES.values())
    assert set(RECIPES) <= set(seen)
    for row in results["models"].values():
        assert len(row["scores"]["runs_s"]) == len(row["all"]["runs_s"]) == 3
        assert row["parameters"] > 0


def test_the_table_is_sorted_by_speed() -> None:
    where = {"processor": "P", "threads": 1, "date": "2026-01-02T03:04", "commit": "0123456789abcdef", "command": "c"}
    row = {"recipe": "r", "parameters": 1_500_000}
    found = {
        "slow": {**row, "scores": {"median_s": 2.0}, "all": {"median_s": 4.0}},
        "fast": {**row, "scores": {"median_s": 0.01}, "all": {"median_s": 0.5}},
    }
    lines = markdown({"environment": where, "pairs": 10_000, "models": found}).splitlines()
    assert lines[2:4] == ["| fast | 1.5 M | 1,000 | 20 |", "| slow | 1.5 M | 5 | 2.5 |"]
    assert "10,000 pairs" in lines[5]
    assert lines[5].endswith("commit 0123456789ab; made by `c`.")
