"""The reader benchmark: what each part measures, and the bounds that the committed figures meet."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import reader
from benchmarks.reader import each_once, markdown, run
from itm_fast.data.reader import default_threads
from python_tests.helpers.processes import ROOT

FIGURES = json.loads((ROOT / "benchmarks" / "results" / "reader.json").read_text())


@pytest.mark.parametrize(("images", "sizes"), [(300, [128, 128, 44]), (256, [128, 128]), (5, [5])])
def test_a_cold_pass_has_each_image_once(images: int, sizes: list[int]) -> None:
    batches = each_once(images, 2)
    assert [len(batch) for batch in batches] == sizes
    joined = np.concatenate(batches).tolist()
    assert sorted(joined) == list(range(images))
    assert images == 5 or joined != sorted(joined)


def test_the_rate_leaves_the_first_batches_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall-clock rate skips the first batches. The processor time covers the whole pass."""
    now = 3.0

    def slow_at_first() -> Iterator[list[int]]:
        nonlocal now
        for number in range(12):
            now += 0.05 if number < 8 else 0.01
            yield [0] * 10

    monkeypatch.setattr(reader, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(reader, "_processor_seconds", lambda: now / 2)
    # Four batches of ten rows take 10 ms each. All twelve take 440 ms; half of it is processor time.
    assert reader._rate(slow_at_first) == pytest.approx((1000, 120 / 0.22))


def test_rows_read_twice_are_no_cold_pass(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(8192))
    with pytest.raises(ValueError, match=r"^bf16: expected each of 4 images once, got 6 rows$"):
        reader._cold("bf16", [file], lambda: iter([[0] * 3, [0] * 3]), 4, 4096)


def test_a_small_run(tmp_path: Path) -> None:
    """A run on 227 images compares the batches of the three readers itself, and the tables show its measurements."""
    found = run(tmp_path, scale=0.002, batches=9, rounds=1, progress=lambda _: None)
    assert (found["images"], found["row_bytes"]) == (227, 36 * 2048 * 4)
    for kind in ("warm_rows_per_second", "warm_rows_per_processor_second"):
        assert {name: len(rates) for name, rates in found[kind].items()} == dict.fromkeys(reader.LABELS, 1)
    for row, width in zip(found["cold"], (4, 2), strict=True):
        assert (row["images"], row["disk_threads"]) == (227, default_threads())
        assert row["bytes_per_second"] == pytest.approx(row["rows_per_second"] * 36 * 2048 * width)
        assert row["disk_random_bytes_per_second"] is None or row["disk_random_bytes_per_second"] > 1e6
    text = markdown(found)
    assert f"Load of the machine: {found['load_before']:.1f} before, {found['load_after']:.1f} after." in text
    assert "; 227 images, each read once in random order. The disk's own rate" in text
    assert f"(`O_DIRECT`): random images {default_threads()} at a time, like the reader's threads, and in order" in text


def test_the_store_reads_three_times_as_fast_as_numpy() -> None:
    """The median of the wall-clock ratios is at least 3, since other processes may disturb a round. Every ratio of
    processor time is at least 3.
    """
    for name in ("fp32", "bf16"):
        for kind in ("warm_rows_per_second", "warm_rows_per_processor_second"):
            rates: dict[str, Any] = FIGURES[kind]
            ratios = [own / plain for own, plain in zip(rates[name], rates["numpy"], strict=True)]
            assert len(ratios) >= 15
            assert statistics.median(ratios) >= 3
            assert kind == "warm_rows_per_second" or min(ratios) >= 3
