"""The examples of docs/losses.md run as they stand there, and the page lists every loss."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from itm_fast import losses

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "losses.md").read_text()


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    printed: list[float] = []
    names: dict = {"print": printed.append, "__name__": "page"}
    for block in blocks:
        exec(compile(block, "losses.md", "exec", flags=0, dont_inherit=True), names)
    assert float(names["second"].grad.abs().max()) > 0
    assert printed == [pytest.approx(0.0, abs=1e-6)]


def test_every_loss_is_listed_with_its_source() -> None:
    rows = re.findall(r"^\| `(\w+)\(?.*?\| (.*?) \|$", PAGE, flags=re.MULTILINE)
    listed = {name for name, _ in rows if name[0].isupper()}
    assert listed == set([name for name in losses.__all__ if name[0].isupper()])
    for name in [name for name in losses.__all__ if name[0].isupper()]:
        described = getattr(losses, name).__doc__ or ""
        assert "    Source: " in described, name
        if "reduction" in inspect.signature(getattr(losses, name)).parameters:
            assert "        reduction: " in described, name
