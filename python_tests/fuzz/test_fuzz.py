"""The fuzzer: a fixed set of cases finds nothing, planted faults are found, and a finding can be repeated."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import itm_fast.functional as F_itm
from python_tests.fuzz import __main__ as fuzz
from python_tests.fuzz import files, operators

SEED = 20_250


@pytest.mark.thorough
def test_some_cases_find_nothing() -> None:
    counts, findings = fuzz.attack(SEED, None, iter(range(31)), lambda _: False)
    assert findings == []
    assert counts == {"operators": 20, "files": 10, "kills": 1}


def test_a_wrong_operator_is_found_and_its_case_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = F_itm.cross_attention_scores

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        return scores(*arguments, **options) * (1 + 1e-3)

    monkeypatch.setattr(F_itm, "cross_attention_scores", wrong)
    found = []
    for number in range(40):
        try:
            operators.run_case(SEED, number)
        except AssertionError as error:
            found.append((number, str(error)))
    assert found
    number, message = found[0]
    with pytest.raises(AssertionError) as again:
        operators.run_case(SEED, number)
    assert str(again.value) == message


@pytest.mark.parametrize(
    ("status", "said", "finding"),
    [
        (None, "", "hangs"),
        (-11, "", "ended by signal 11"),
        (1, "Traceback (most recent call last):\nKeyError: 'x'\n", "Traceback"),
        (1, "itm-fast: error: a\nitm-fast: error: b\n", "error: b"),
        (1, "itm-fast: error: not enough memory; a smaller model\n", "more memory"),
        (3, "", "exit status 3"),
    ],
)
def test_anything_but_success_or_one_line_is_a_finding(status: int | None, said: str, finding: str) -> None:
    with pytest.raises(AssertionError, match=finding):
        files._judge(status, said)
    files._judge(0, "itm-fast: warning: something\n")
    files._judge(1, "itm-fast: warning: something\nitm-fast: error: config.json: damaged\n")


@pytest.mark.thorough
def test_a_command_that_writes_outside_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = files.make_base(tmp_path / "base")

    def careless(arguments: list[str]) -> tuple[int, str]:
        for link in (tmp_path / "case" / "base").rglob("*"):
            if link.is_symlink() and link.exists():
                link.write_bytes(b"overwritten")
        return 0, ""

    monkeypatch.setattr(files, "_in_child", careless)
    messages = []
    for number in itertools.count():
        try:
            if files.run_case(SEED, number, base, tmp_path / "case").startswith("link in data"):
                raise RuntimeError("the link was not followed")
        except AssertionError as error:
            messages.append(str(error))
            if "a file outside was changed" in messages[-1]:
                break
    assert messages[-1].startswith("link in ")


@pytest.mark.thorough
def test_the_command_writes_counts_and_repeats_one_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "counts.json"
    with pytest.raises(typer.Exit) as ended:
        fuzz.main(seed=3, only="operators", case=5, out=out)
    assert ended.value.exit_code == 0
    record = json.loads(out.read_text())
    assert (record["seed"], record["cases"], record["findings"]) == (3, {"operators": 1}, [])
    assert "operators         1 cases" in capsys.readouterr().out
    with pytest.raises(typer.BadParameter, match="needs --only"):
        fuzz.main(seed=3, case=5)
