"""The benchmark of length bucketing: the chosen batches, what it measures, and its table."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.buckets import MODELS, chosen_batches, markdown, run


def test_batches_are_full_and_spread_over_all_lengths() -> None:
    lengths = np.random.default_rng(0).integers(8, 25, 1000)
    (plain, padding), (like, less) = (chosen_batches(lengths, window, 32, 4) for window in (0, 50))
    assert [len(one) for one in [*plain, *like]] == [32] * 8
    # A window is sorted by length: a batch spans one or two lengths, and the four batches are far apart.
    assert all(np.ptp(lengths[one]) <= 2 for one in like)
    assert np.ptp([lengths[one].mean() for one in like]) > 8
    assert padding > 0.3
    assert less < 0.05


def test_a_small_run(tmp_path: Path) -> None:
    sizes = {"embed_dim": 16, "word_dim": 12}
    found = run(tmp_path, scale=0.001, batch=8, batches=2, rounds=2, progress=lambda _: None, sizes=sizes)
    for times in found["step_seconds"].values():
        assert {window: len(own) for window, own in times.items()} == {"0": 2, "10": 2, "50": 2}
        assert min(min(own) for own in times.values()) > 0
    shares = found["padding_share"]
    assert shares["0"] > shares["10"] > shares["50"] > 0


def test_the_table() -> None:
    times = {"0": [2.0, 2.2, 2.4], "10": [1.0, 2.0, 1.5], "50": [1.0, 1.0, 1.0]}
    results = {
        "environment": {"date": "2026-01-02T03:04", "command": "c", "processor": "P", "torch": "2.0"},
        "batch": 128, "batches": 3, "load_before": 0.25, "load_after": 1.0,
        "padding_share": {"0": 0.375, "10": 0.077, "50": 0.017}, "step_seconds": dict.fromkeys(MODELS, times),
    }  # fmt: skip
    lines = markdown(results).splitlines()
    ten = "1.50 s, 1.60x as fast [1.10, 2.00]"
    assert lines[3] == f"| 10 | 7.7% | {ten} | {ten} |"
    assert lines[-1].endswith("in brackets. Load of the machine: 0.2 before, 1.0 after.")
    assert "3 batches spread over all lengths in each of 3 interleaved rounds after a warm-up round." in lines[-1]
