"""The benchmarks of long sets and of RCAR's steps: small runs and their tables."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import long_sets, regulated_former, regulated_step
from itm_fast.benchmarking.workloads import Sizes
from python_tests.helpers.fragments import native_calls


def test_steps_of_rcar() -> None:
    results = regulated_step.run(Sizes(4, 4, 16), rounds=2, threads=1, memory=False)
    assert list(results["measured"]) == [
        f"{form} {what}" for form in regulated_step.FORMS for what in ("scores", *regulated_step.MININGS)
    ]
    assert all(len(found["runs_s"]) == 2 for found in results["measured"].values())
    assert max(results["gradient_errors"].values()) < 1e-3
    for form, names in (("native", ["regulated_scores", "triplet_loss"]), ("packed", [])):
        with native_calls() as calls:
            regulated_step.make_step(form, Sizes(4, 4, 16), "hardest")()
        found = [name for name, _ in calls]
        assert [name for name in names if any(name in one for one in found)] == names
        assert ("regulated_scores_backward" in found) is (form == "native")
    for found in results["measured"].values():
        found.update(median_s=2.0, min_s=1.0, max_s=3.0, peak_bytes=5_000_000)
    results["measured"]["native all"]["median_s"] = 9.0
    lines = regulated_step.markdown(results).splitlines()
    assert lines[2] == "| itm_fast, forward | 2.00 s [1.00, 3.00] | 1.00 | 5 MB |  |"
    assert lines[4].startswith("| itm_fast, step, all negatives | 9.00 s [1.00, 3.00] | 4.50 | 5 MB | ")


def test_steps_of_rcar_against_a_former_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = regulated_former.measure(regulated_former.ROOT, "all", 4, 16)
    assert found["seconds"] > 0
    assert 0 <= found["peak_bytes"] < 50_000_000

    def measure(checkout: Path, form: str, batch: int, dim: int) -> dict[str, float]:
        times = {"scores": 2.0, "hardest": 3.0, "all": 10.0}
        return {"seconds": times[form] * (2 if checkout.name == "other" else 1), "peak_bytes": 5_000_000}

    monkeypatch.setattr(regulated_former, "measure", measure)
    with pytest.raises(subprocess.CalledProcessError):
        regulated_former.run(Path("other"), rounds=1, batch=4, dim=16)
    results = regulated_former.run(regulated_former.ROOT, rounds=2, batch=4, dim=16)
    assert results["former_commit"] == results["environment"]["commit"]
    results["measured"]["former"]["all"][1]["seconds"] = 30.0
    lines = regulated_former.markdown(results).splitlines()
    assert lines[4] == (
        "| step, all negatives | 20.00 s [10.00, 30.00] | 10.00 | 5 MB | 10.00 s [10.00, 10.00] | 5.00 | 5 MB | 2.00 |"
    )


@pytest.mark.parametrize("model", ["scan", "rcar"])
def test_long_sets(model: str) -> None:
    sizes = long_sets.PatchSizes(batch=3, dim=16, patches=20, tokens=5, model=model)
    results = long_sets.run([sizes], rounds=1, threads=1, memory=False)
    (case,) = results["measured"]
    assert case["products"] == 3 * 20 * 3 * 5 * 16
    assert case["errors"]["native"] < 1e-6 < case["errors"]["native bf16"] < 1e-1
    for found in case["forms"].values():
        found.update(median_s=0.002, min_s=0.001, max_s=0.003, peak_bytes=5_000_000)
    case["products"] = 4_000_000_000
    case["errors"]["native"] = 1e-7
    lines = long_sets.markdown(results).splitlines()
    assert lines[3] == "| 20 x 5 | itm_fast | 2 ms [1, 3] | 2000 GMAC/s | 2 ms [1, 3] | 5 MB | 1.0e-07 |"
    assert f"; {model.upper()} t2i" in lines[6]
    with pytest.raises(KeyError):
        long_sets.make_call("other", "scores", sizes)
