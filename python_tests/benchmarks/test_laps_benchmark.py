"""The benchmark of LAPS: the loop is the module, and a small run renders."""

from __future__ import annotations

import pytest
import torch

from benchmarks import laps
from itm_fast.nn.patch_slimming import PatchSlimming
from python_tests.helpers.fragments import random_fragments


@pytest.mark.parametrize("ratios", [{}, {"keep_ratio": 0.8, "aggregation_ratio": 0.6}])
def test_the_loop_scores_as_the_module(ratios: dict[str, float]) -> None:
    module = PatchSlimming(12, 20, **ratios).double()
    images = random_fragments([20] * 3, 12, torch.float64, 1)
    captions = random_fragments([4, 1, 7], 12, torch.float64, 2)
    found = laps.loop_scores(module, images, captions)
    torch.testing.assert_close(found, module(images, captions), rtol=0, atol=1e-7)


@pytest.mark.thorough
def test_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laps, "DIM", 16)
    monkeypatch.setattr(laps, "PATCHES", 12)
    results = laps.run([3], rounds=1, threads=1)
    forms = results["measured"][0]["forms"]
    assert list(forms) == list(laps.FORMS)
    assert all(form["largest_difference"] < 1e-5 for form in forms.values())
    assert forms["itm_fast"]["median_s"] > 0
    results["environment"]["command"] = "python -m benchmarks.laps"
    results["environment"]["commit"] = results["environment"]["commit"] or "0" * 12
    assert laps.markdown(results).count("| 3 |") == 3
