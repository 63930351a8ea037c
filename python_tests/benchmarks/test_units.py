"""Numbers and commits as the tables of the benchmarks show them."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.render import PAGES, RESULTS
from benchmarks.units import amount, commit_of, seconds


def test_numbers_have_the_greatest_unit_below_them() -> None:
    assert (amount(1500, "B"), amount(2e12, "FLOP"), amount(0.5, "B")) == ("1.5 kB", "2 TFLOP", "0.5 B")
    assert (seconds(90), seconds(1.5e-3), seconds(5e-10)) == ("1.5 min", "1.5 ms", "0.5 ns")
    assert (seconds(0.9996), amount(999.7e3, "B")) == ("1 s", "1 MB")


@pytest.mark.parametrize(
    ("commit", "changed", "text"),
    [
        ("0123456789abcdef", False, "0123456789ab"),
        ("0123456789abcdef", True, "0123456789ab, with uncommitted changes"),
        (None, None, "unknown"),
    ],
)
def test_a_commit_names_uncommitted_changes(commit: str | None, changed: bool | None, text: str) -> None:
    assert commit_of({"commit": commit, "uncommitted_changes": changed}) == text
    if commit is None:
        assert commit_of({"commit": commit}, "an installed package") == "an installed package"


def test_pages_name_the_uncommitted_changes_of_results() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    counted = 0
    for path in RESULTS.glob("*.json"):
        where = json.loads(path.read_text(encoding="utf-8")).get("environment", {})
        if where.get("uncommitted_changes"):
            found = re.findall(rf"{where['commit'][:12]}(, with uncommitted changes)?", text)
            assert all(found), path.name
            counted += len(found)
    assert counted
