"""The README's example runs as it stands there, and its table of operators is the public module."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

import itm_fast.functional as F_itm

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    printed: list[float] = []
    torch.manual_seed(0)
    names: dict = {"print": printed.append}
    exec(code, names)
    (rsum,) = printed
    assert 0 <= rsum <= 600
    assert names["scores"].shape == (3, 3)
    assert float(names["words"].grad.abs().sum()) > 0
    # Words past a caption's length take no part.
    assert float(names["words"].grad[0, 12:].abs().max()) == 0
    assert len([line for line in code.splitlines() if line]) <= 15


def test_every_operator_is_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE)
    assert sorted(rows) == sorted(F_itm.__all__)


def test_the_committed_demo_learned_what_it_promises_in_the_time_it_promises() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())
    assert result["trained"]["rsum"] >= 300
    assert result["seconds"] <= 8 * 60
    assert result["environment"]["threads"] == 2


def test_links_and_pictures_of_all_pages_exist() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    assert len(pages) >= 9
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"
