"""Writes the tables of settings and recipes into docs/training.md from their sources; --check only compares.

Each table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from itm_fast.cli.options import markdown_table
from itm_fast.models import (
    BFANConfig,
    CHANConfig,
    DBLConfig,
    SCANConfig,
    SGRAFConfig,
    VSEInftyConfig,
    VSEPPConfig,
    VSRNConfig,
)
from itm_fast.training import TrainConfig, recipes

PAGE = Path(__file__).resolve().parents[1] / "docs" / "training.md"
TABLES = {
    "train": TrainConfig,
    "scan": SCANConfig,
    "bfan": BFANConfig,
    "sgraf": SGRAFConfig,
    "chan": CHANConfig,
    "dbl": DBLConfig,
    "vsepp": VSEPPConfig,
    "vse_infty": VSEInftyConfig,
    "vsrn": VSRNConfig,
}


def rendered(text: str) -> str:
    """`text` with every table made anew."""

    def table(match: re.Match[str]) -> str:
        lines = recipes.markdown_table() if match[1] == "recipes" else markdown_table(TABLES[match[1]])
        return f"<!-- table: {match[1]} -->\n\n{lines}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    if "--check" not in sys.argv:
        PAGE.write_text(rendered(text), encoding="utf-8")
        return 0
    if rendered(text) != text:
        print(f"{PAGE}: the tables are out of date; run python {Path(__file__).name}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
