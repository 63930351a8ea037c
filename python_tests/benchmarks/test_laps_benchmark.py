"""The benchmark of LAPS: the loop is the module, memory is counted as it is kept, and a small run renders."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import laps, laps_encoders, laps_steps
from benchmarks.saved_memory import saved_bytes, without_memory
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
    results["environment"]["commit"] = results["environment"]["commit"] or "0" * 12
    assert laps.markdown(results).count("| 3 |") == 3


def test_bytes_kept_for_the_backward_pass() -> None:
    """The formula of each operation says what it keeps; a storage counts once, a weight never."""
    weight = torch.randn(5, 3, requires_grad=True)
    rows = torch.randn(7, 3, requires_grad=True)
    assert saved_bytes(lambda: rows.exp()) == 4 * 7 * 3  # its result
    assert saved_bytes(lambda: (rows @ weight.t(), rows.view(3, 7) * 2.0), [weight]) == 4 * 7 * 3  # its input
    assert saved_bytes(lambda: rows.sin() * rows.cos(), [rows]) == 4 * 2 * 7 * 3  # both factors
    with without_memory():
        large = torch.empty(1 << 20, 1 << 12, requires_grad=True)  # 16 GB
        assert saved_bytes(lambda: large.exp()) == 1 << 34


@pytest.mark.parametrize("form", ["loop over captions", "all pairs at once"])
def test_the_counts_of_encoders_and_scores_add_up_to_that_of_a_step(form: str) -> None:
    sizes = laps_encoders.SMALL
    model, inputs = laps_encoders.make_model(sizes), laps_encoders.make_inputs(sizes, 3)

    def forward() -> torch.Tensor:
        return laps.FORMS[form](model.similarity, *model.encode(*inputs))

    parts = sum(laps_encoders.encoder_bytes(model, sizes, 3)) + laps_encoders.score_bytes(model, sizes, 3, form)
    assert parts == saved_bytes(forward, model.parameters())


@pytest.mark.thorough
def test_a_small_run_with_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laps_steps, "peak_memory", lambda *_, **__: 5_000_000)
    sizes, saved = laps_encoders.SMALL, []
    common = {"measured": [4], "rounds": 2, "threads": 1, "micro_batches": (1, 2), "sizes": sizes,
              "most_bytes": 5e6}  # fmt: skip
    results = laps_steps.run(3, [4, 5], **common, save=lambda found: saved.append(json.loads(json.dumps(found))))
    variants = results["small"]["variants"]
    assert list(variants) == list(laps_encoders.VARIANTS)
    for variant in variants.values():
        assert variant["largest_score_difference"] < 1e-6
        assert variant["gradient_difference"] < 1e-5
        assert variant["peak_bytes"] == 5_000_000
    assert variants["micro-batches"]["gradient_difference"] > 0
    large, unmeasured = results["large"]
    taken = [name for name, one in large["variants"].items() if "seconds" in one]
    assert taken == ["published loop", "all pairs at once", "micro-batches", "both"]
    assert large["variants"]["gradient sparsity"]["counted_bytes"] > 5e6
    assert not any("seconds" in one for one in unmeasured["variants"].values())
    model = laps_encoders.make_model(sizes)
    whole = sum(laps_encoders.encoder_bytes(model, sizes, 4))
    assert large["variants"]["gradient sparsity"]["counted_bytes"] == whole + 5_000_000
    results["commits"] = ["0" * 40]
    text = laps_steps.markdown(results)
    assert text.count("| both |") == 3
    assert text.count("counted; scores measured") == 4

    # An interrupted call continues: nothing is measured twice.
    assert [len(found.get("large", [])) for found in saved] == [0, 1, *[2] * (1 + len(variants) + len(taken))]
    middle = laps_steps.run(3, [4, 5], **common, before=saved[1])
    assert middle["small"]["variants"]["both"]["runs_s"] == results["small"]["variants"]["both"]["runs_s"]
    again = laps_steps.run(3, [4, 5], **common, before=results)
    assert {name: again[name] for name in ("small", "large")} == {name: results[name] for name in ("small", "large")}
