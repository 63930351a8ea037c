"""The CPU benchmark: timings, equal results of all variants, the written results, and the figures in the README."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import maxsim_workloads as maxsim
from benchmarks.cpu_table import BOUND, MEMORY_BOUND, markdown, summary
from benchmarks.maxsim_workloads import MaxsimSizes
from itm_fast import reference
from itm_fast.benchmarking import index_search, one_query, regulated, workloads
from itm_fast.benchmarking.index_search import IndexSizes
from itm_fast.benchmarking.measure import CpuMeter, Timing, interleave, peak_memory, status_bytes
from itm_fast.benchmarking.run import PRESETS, run
from itm_fast.benchmarking.table import markdown as table_of_all
from itm_fast.benchmarking.table import time
from itm_fast.benchmarking.workloads import Sizes

ROOT = Path(__file__).resolve().parents[2]


def test_variants_run_in_turn() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in ("slow", "a", "b")}
    timings = interleave(calls, {"slow": 2, "a": 4, "b": 4})
    # One warm-up of each variant. Then the slow variant runs in every second round.
    assert order == ["slow", "a", "b", "a", "b", "slow", "a", "b", "a", "b", "slow", "a", "b"]
    assert {name: len(timing.runs) for name, timing in timings.items()} == {"slow": 2, "a": 4, "b": 4}
    assert all(second >= 0 for timing in timings.values() for second in timing.runs)
    once = interleave({"loop": lambda: order.append("once")}, {"loop": 1})
    assert order.count("once") == len(once["loop"].runs) == 1
    assert Timing([3.0, 1.0, 2.0]).as_dict() == {"median_s": 2.0, "min_s": 1.0, "max_s": 3.0, "runs_s": [3.0, 1.0, 2.0]}


def allocate(megabytes: int, small: bool = False):
    return lambda: torch.ones((1 if small else megabytes) * 250_000)


def test_peak_memory_is_what_the_call_takes() -> None:
    peak = peak_memory(allocate, 80, threads=1)
    assert (peak is None) == (sys.platform != "linux")
    assert peak is None or 78e6 < peak < 90e6


def test_the_memory_of_earlier_calls_is_given_back_first() -> None:
    """Small blocks stay with the allocator after a call, as those of a graph with millions of nodes do."""
    kept = [torch.zeros(8000) for _ in range(6000)]
    held = status_bytes("RssAnon")
    last = kept.pop()
    del kept
    peak_memory(workloads.make_loss, "plain", 4, "all", "cpu", threads=1)
    assert status_bytes("RssAnon") < held - 100 * 2**20
    assert last.shape == (8000,)


def test_inputs_are_those_of_coco() -> None:
    words, regions = workloads.inputs(Sizes(images=4, captions=2000, dim=8))
    lengths = words.lengths
    assert int(lengths.min()) >= 8
    assert int(lengths.max()) <= 24
    assert float(lengths.double().mean()) == pytest.approx(13.0, abs=0.3)
    assert regions.lengths.tolist() == [36] * 4
    assert torch.allclose(words.values.norm(dim=1), torch.ones(len(words.values)))
    again, _ = workloads.inputs(Sizes(images=4, captions=2000, dim=8))
    assert torch.equal(words.values, again.values)


def test_all_variants_compute_the_same() -> None:
    """Every variant gives the same scores and gradients, so that speed ratios compare equal work."""
    sizes = Sizes(images=6, captions=6, dim=32)
    exact = reference.cross_attention_scores(*(part.to(torch.float64) for part in workloads.inputs(sizes)))
    steps = {}
    for name in workloads.SCORES:
        low = name.endswith(("bf16", "medium"))
        assert torch.allclose(workloads.make_scores(name, sizes)().double(), exact, atol=2e-2 if low else 1e-6)
        # In low precision, the hardest negative may be another pair. The loss over all negatives is smooth.
        steps[name] = workloads.make_step(name, sizes, "all" if low else "hardest")()
    all_negatives = workloads.make_step("loop", sizes, "all")()
    for name, gradients in steps.items():
        low = name.endswith(("bf16", "medium"))
        for gradient, expected in zip(gradients, all_negatives if low else steps["loop"], strict=True):
            assert gradient.dtype == (torch.bfloat16 if name.endswith("bf16") else torch.float32)
            bound = 0.05 * float(expected.abs().max()) if low else 1e-5
            assert float((gradient - expected).abs().max()) < bound, name
    assert torch.get_float32_matmul_precision() == "highest"
    gallery = Sizes(images=4, captions=20, dim=32)
    summaries = [workloads.make_evaluation(name, gallery)() for name in ("loop", "native")]
    assert summaries[0] == summaries[1]
    losses = [workloads.make_loss(name, 16, "all")() for name in ("plain", "native")]
    assert torch.allclose(*losses)
    for mining in ("hardest", "all"):
        plain, native = (workloads.make_boosting(name, 16, mining)() for name in ("plain", "native"))
        assert torch.equal(plain, native)
        assert bool(native.any())
        assert workloads.loss_accuracy("boosting", "native", 16, mining)["relative_loss_error"] < 1e-6
    assert workloads.accuracy("native", sizes)["max_score_error"] < 1e-6


def test_all_variants_of_one_query_compute_the_same() -> None:
    sizes = Sizes(images=30, captions=1, dim=32)
    for name in one_query.QUERIES:
        assert one_query.make_query(name, sizes)().shape == (1, 30)
        assert one_query.accuracy(name, sizes)["max_score_error"] < (2e-2 if name.endswith("bf16") else 1e-6), name


def test_all_searches_find_the_same() -> None:
    sizes = IndexSizes(images=50, dim=32)
    plain, exact, candidates = (index_search.make_search(name, sizes)() for name in index_search.SEARCHES)
    assert [int(hit.item.id) for hit in exact[0].hits] == plain.indices[0].tolist()
    assert (exact[0].hits, exact[0].scored) == (candidates[0].hits, 50)
    assert index_search.accuracy("plain", sizes)["max_score_error"] < 1e-6
    # Stored rows have 8 bits of precision.
    assert 1e-7 < index_search.accuracy("native exact", sizes)["max_score_error"] < 1e-2
    built, opened = (make("native", sizes)() for make in (index_search.make_build, index_search.make_open))
    assert len(built) == len(opened) == 50


def test_all_variants_of_the_regulators_compute_the_same() -> None:
    sizes = Sizes(images=6, captions=6, dim=32)
    weights = regulated.parameters(sizes).to(torch.float64)
    sides = [part.to(torch.float64) for part in workloads.inputs(sizes)]
    exact = reference.regulated_scores(*sides, weights).detach()
    assert float(exact.std()) > 1e-4
    loop = regulated.make_regulated_step("loop", sizes)()
    for name in regulated.SCORES:
        low = name.endswith(("bf16", "medium"))
        scores = regulated.make_regulated_scores(name, sizes)().double()
        assert torch.allclose(scores, exact, rtol=0, atol=2e-2 if low else 1e-6), name
        if low:
            continue
        for gradient, expected in zip(regulated.make_regulated_step(name, sizes)(), loop, strict=True):
            assert float((gradient - expected).abs().max()) < 1e-5, name
    assert torch.get_float32_matmul_precision() == "highest"
    assert regulated.accuracy("native", sizes)["max_score_error"] < 1e-6
    assert regulated.accuracy("packed", sizes)["changed_hardest_negatives"] == 0.0


def test_all_variants_of_maxsim_compute_the_same() -> None:
    sizes = MaxsimSizes(images=6, captions=6, dim=32, words=5, patches=9)
    queries, contexts = maxsim.inputs(sizes)
    assert (queries.lengths.tolist(), contexts.lengths.tolist()) == ([5] * 6, [9] * 6)
    exact = torch.einsum("qnd,ckd->qcnk", queries.to_padded()[0].double(), contexts.to_padded()[0].double())
    exact = exact.amax(dim=3).sum(dim=2)
    loop = maxsim.make_maxsim_step("loop", sizes)()
    for name in maxsim.SCORES:
        low = name.endswith(("bf16", "medium"))
        scores = maxsim.make_maxsim_scores(name, sizes)().double()
        assert torch.allclose(scores, exact, rtol=0, atol=3e-2 if low else 1e-5), name
        assert maxsim.make_maxsim_scores(name, sizes, small=True)().shape == (2, 2)
        if low:
            continue
        for gradient, expected in zip(maxsim.make_maxsim_step(name, sizes)(), loop, strict=True):
            assert float((gradient - expected).abs().max()) < 1e-5, name
    assert maxsim.accuracy("native", sizes)["max_score_error"] < 1e-5


def test_a_run_is_written_down_whole() -> None:
    preset = replace(PRESETS["quick"], compiled=False, memory=False)
    results = json.loads(json.dumps(run(preset, CpuMeter(1))))
    environment = results["environment"]
    assert environment["threads"] == 1
    assert environment["torch"] == torch.__version__
    assert environment["instruction_set"] in ("portable", "avx2", "avx512", "avx512_bf16", "amx")
    step = results["workloads"]["step"]["variants"]
    assert len(step["native"]["runs_s"]) == PRESETS["quick"].runs
    assert step["native"]["median_s"] > 0
    text = markdown(results)
    assert "16 x 16" in text
    assert "target" in text
    ratio = step["loop"]["median_s"] / step["native"]["median_s"]
    assert f"**{ratio:.1f}x**" in text
    high = results["workloads"]["step"]["variants"]["native high"]
    assert f'| float32, "high" | {time(high)} |' in text
    regulated_scores = results["workloads"]["regulated scores"]["variants"]
    error = regulated_scores["native"]["accuracy"]["max_score_error"]
    assert 0 < error < 1e-6
    assert f"| {error:.1e} |" in text.split("accuracy of RCAR scores")[1]
    ratio = regulated_scores["loop"]["median_s"] / regulated_scores["native"]["median_s"]
    assert f"**{ratio:.1f}x**" in text.split("RCAR t2i, 2 RAR and 1 RCR")[1]
    assert f"| **{ratio:.1f}x** |" in summary(results).split("RCAR scores, 16 x 16")[1]
    error = max(error, results["workloads"]["scores"]["variants"]["native"]["accuracy"]["max_score_error"])
    assert f"Scores differ from float64 by at most {error:.1e}" in summary(results)
    assert "target" not in summary(results)
    query = results["workloads"]["query"]["variants"]
    assert f"one caption of {one_query.WORDS} words against 40 images" in text
    error = query["prepared"]["accuracy"]["max_score_error"]
    assert 0 < error < 1e-6
    assert f"| itm_fast, prepared | float32 | {time(query['prepared'])} |" in text
    assert f"| {error:.1e} |" in text.split("itm_fast, prepared")[1]
    searches = results["workloads"]["index search"]["variants"]
    assert [len(searches[name]["runs_s"]) for name in index_search.SEARCHES] == [2, 4, 20]
    assert f"| itm_fast exact | {time(searches['native exact'])} |" in table_of_all(results)
    boosting = results["workloads"]["boosting all 64"]["variants"]
    error = boosting["native"]["accuracy"]["relative_loss_error"]
    assert 0 <= error < 1e-6
    assert text.splitlines()[-1].startswith('| "all", B = 64 |')
    assert text.splitlines()[-1].endswith(f"| {error:.1e} |")


def test_a_target_that_is_missed_is_said() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text())
    variants = results["workloads"]["scores"]["variants"]
    variants["native"]["median_s"] = variants["loop"]["median_s"] / 3.5
    assert "7x, reached 50 % of it" in markdown(results)
    assert BOUND in markdown(results)
    variants["native"]["median_s"] = variants["packed"]["median_s"]
    assert "2x, reached" in markdown(results)
    step = results["workloads"]["step"]["variants"]
    step["native"]["peak_bytes"] = step["loop"]["peak_bytes"] / 40
    assert MEMORY_BOUND not in markdown(results)
    step["native"]["peak_bytes"] = step["loop"]["peak_bytes"] / 19.5
    assert "1/39, reached 50 % of it |" in markdown(results)
    assert MEMORY_BOUND in markdown(results)
