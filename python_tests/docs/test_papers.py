"""The coverage of the papers: the page is up to date, every row is complete, and a wrong name is found."""

from __future__ import annotations

import pytest
import write_coverage

ROW = {"item": "Eq 1", "what": "the loss", "where": ["functional.triplet_loss"]}


def test_the_page_is_up_to_date() -> None:
    assert write_coverage.PAGE.read_text(encoding="utf-8") == write_coverage.page()


@pytest.mark.parametrize(
    "place",
    [
        "functional.triplet_los", "model other", "loss other", "importer other", "recipe other", "experiment other",
        "experiment rcar: other", "option --other", "setting scan.other", "setting other.dim", "page other.md",
        "benchmark other",
        "other x",
    ],
)  # fmt: skip
def test_a_name_that_does_not_exist_is_found(place: str) -> None:
    assert write_coverage.problems([{**ROW, "where": [place]}]) == [f"Eq 1: '{place}' does not exist"]


def test_rows_that_are_not_complete_are_found() -> None:
    assert write_coverage.problems([ROW, {**ROW, "test": ["docs/test_papers.py"]}]) == []
    assert write_coverage.problems([{**ROW, "test": ["docs/test_papers.py::test_other", "docs/other.py"]}]) == [
        "Eq 1: test 'docs/test_papers.py::test_other' does not exist",
        "Eq 1: test 'docs/other.py' does not exist",
    ]
    both = "Eq 1: expected either 'where' or the reason 'missing'"
    assert write_coverage.problems([{**ROW, "missing": "a reason"}]) == [both]
    assert write_coverage.problems([{"item": "Eq 1", "what": "the loss"}]) == [both]
    assert write_coverage.problems([{"where": ["model scan"], "here": "x"}]) == [
        "a row without item: unknown keys here",
        "a row without item: 'what' is missing",
    ]
