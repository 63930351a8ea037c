"""The examples of docs/regulators.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "regulators.md").read_text()


def test_the_examples_run_and_learn() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    printed: list[object] = []
    names: dict = {"print": printed.append, "__name__": "page"}
    for block in blocks:
        exec(compile(block, "regulators.md", "exec", flags=0, dont_inherit=True), names)
    assert sum(names["losses"][-3:]) < 0.9 * sum(names["losses"][:3])
    assert printed == [[(4, 5), (4, 5)], [(4,), (4,)]]
