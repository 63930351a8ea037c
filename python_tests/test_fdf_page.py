"""The example of docs/fdf.md runs as it stands there, and the page of results is that of the experiment."""

from __future__ import annotations

import re
from pathlib import Path

import experiments
import torch

ROOT = Path(__file__).resolve().parents[1]
# What the rows of the experiment differ in.
METHOD = ("conversions", "conversion_layer", "reweighting", "realignment", "other_batches", "seed")


def test_the_example_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "fdf.md").read_text(), flags=re.DOTALL)
    names: dict = {"__name__": "page"}
    exec(compile(block, "fdf.md", "exec", flags=0, dont_inherit=True), names)
    assert names["converted"].shape == (4, 40, 16)
    mean = names["converted"].detach().mean(0)
    torch.testing.assert_close(names["fused"].values.detach(), mean / mean.norm(dim=1, keepdim=True))
    torch.testing.assert_close(names["negatives"], names["side"].conversions(names["others"])[1])
    assert 0 < float(names["loss"]) < 8 * 2 * 1.2


def test_the_page_of_results_is_up_to_date_and_budgets_are_equal() -> None:
    path = ROOT / "benchmarks" / "experiments" / "fdf.yaml"
    page = ROOT / "docs" / "results" / "fdf.md"
    assert experiments.main(["table", str(path), "--page", str(page), "--check"]) == 0
    experiment = experiments.read(path)
    trained = [experiment.identity(run)["train"] for runs in experiment.rows.values() for run in runs]
    assert len(trained) == 15
    budgets = [{name: value for name, value in train.items() if name not in METHOD} for train in trained]
    assert all(budget == budgets[0] for budget in budgets)
    assert sorted({train["conversions"] or 0 for train in trained}) == [0, 1, 2, 4, 8]
