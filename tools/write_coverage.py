"""Write docs/papers.md, the coverage of the five papers, from tools/papers/*.yaml. All that a row names must exist.

    python tools/write_coverage.py            # writes the page
    python tools/write_coverage.py --check    # exit status 1 if it is out of date

A row has an `item` of the paper, `what` it is, and `where` it is here: a public name of the package
(`functional.triplet_loss`), `model NAME`, `loss NAME`, `importer NAME`, `recipe NAME`, `experiment NAME` or
`experiment NAME: ROW` (`planned/NAME` for a list without results), `option --NAME` of `itm-fast train`, `setting
MODEL.NAME`, `benchmark NAME`, a script of benchmarks/, or `page PATH` below docs/. `test` names files below
python_tests/, or `file::test`. `note` says what differs. A row without `where` has `missing`, the reason.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import attrs
import yaml

from itm_fast import losses, models
from itm_fast.cli.train import train_command
from itm_fast.compat import SOURCES

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tools" / "papers"
PAGE = ROOT / "docs" / "papers.md"
PAPERS = ("rcar", "selhn", "dbl", "addr", "fdf")
KEYS = {"item", "what", "where", "test", "note", "missing"}


@functools.cache
def _options() -> set[str]:
    return {name for parameter in train_command().params for name in (*parameter.opts, *parameter.secondary_opts)}


@functools.cache
def _experiment_rows(name: str) -> set[str]:
    file = ROOT / "benchmarks" / "experiments" / f"{name}.yaml"
    if not file.is_file():
        return set()
    experiment = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {row["name"] for row in (*experiment["rows"], *experiment.get("ensembles", ()))}


def _exists(place: str) -> bool:
    kind, _, name = place.partition(" ")
    if not name:
        module, _, attribute = place.rpartition(".")
        return attribute in importlib.import_module(f"itm_fast.{module}").__all__
    if kind == "experiment":
        experiment, _, row = name.partition(": ")
        rows = _experiment_rows(experiment)
        return bool(rows) and (not row or row in rows)
    if kind == "setting":
        model, _, field = name.partition(".")
        return model in models.names() and field in {one.name for one in attrs.fields(models.config_class(model))}
    known = {
        "model": lambda: name in models.names(),
        "loss": lambda: name in losses.names(),
        "importer": lambda: name in SOURCES,
        "recipe": lambda: (ROOT / "itm_fast" / "recipes" / f"{name}.yaml").is_file(),
        "option": lambda: name in _options(),
        "benchmark": lambda: (ROOT / "benchmarks" / f"{name}.py").is_file(),
        "page": lambda: (ROOT / "docs" / name).is_file(),
    }
    return kind in known and known[kind]()


def _tested(test: str) -> bool:
    name, _, function = test.partition("::")
    file = ROOT / "python_tests" / name
    if not file.is_file():
        return False
    return not function or re.search(rf"^def {function}\(", file.read_text(encoding="utf-8"), re.M) is not None


def problems(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each name that does not exist and each row that is not complete."""
    found = []
    for row in rows:
        item = row.get("item", "a row without item")
        if unknown := set(row) - KEYS:
            found.append(f"{item}: unknown keys {', '.join(sorted(unknown))}")
        if not row.get("what"):
            found.append(f"{item}: 'what' is missing")
        if bool(row.get("where")) == bool(row.get("missing")):
            found.append(f"{item}: expected either 'where' or the reason 'missing'")
        found += [f"{item}: '{place}' does not exist" for place in row.get("where", []) if not _exists(place)]
        found += [f"{item}: test '{test}' does not exist" for test in row.get("test", []) if not _tested(test)]
    return found


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")


def _place(place: str) -> str:
    kind, _, name = place.partition(" ")
    if kind == "page":
        return f"[{Path(name).stem}]({name})"
    return f"`{place}`" if not name else f"{kind} `{name}`" if kind != "option" else f"`{name}`"


def _test(test: str) -> str:
    name, _, function = test.partition("::")
    return f"`{Path(name).stem}`" + (f" `{function.removeprefix('test_')}`" if function else "")


def section(paper: dict[str, Any]) -> str:
    """Return heading and table of one paper."""
    lines = [f"## {paper['title']}", "", "| in the paper | here | tests | differences, or why it is missing |"]
    lines.append("| --- | --- | --- | --- |")
    for row in paper["rows"]:
        tests = ", ".join(map(_test, row.get("test", [])))
        here = ", ".join(map(_place, row.get("where", []))) or "**missing**"
        remark = _cell(row.get("note") or row.get("missing") or "")
        lines.append(f"| {_cell(row['item'])}: {_cell(row['what'])} | {here} | {tests} | {remark} |")
    return "\n".join(lines)


def load(name: str) -> dict[str, Any]:
    """Read the rows of a paper."""
    paper: dict[str, Any] = yaml.safe_load((DATA / f"{name}.yaml").read_text(encoding="utf-8"))
    return paper


def page() -> str:
    """Return the page.

    Raises:
        ValueError: a row names something that does not exist, or is not complete.
    """
    papers = {name: load(name) for name in PAPERS}
    if found := [f"{name}.yaml: {line}" for name, paper in papers.items() for line in problems(paper["rows"])]:
        raise ValueError("\n".join(found))
    rows = [row for paper in papers.values() for row in paper["rows"]]
    missing = sum("missing" in row for row in rows)
    head = [
        "# Coverage of the papers",
        "",
        "What the five papers contain, where it is here, and what tests it. `tools/write_coverage.py` generates the "
        "page from `tools/papers/`, and a test checks that every name exists.",
        "",
        f"{len(rows)} rows, {missing} of them missing. Tables of results on Flickr30K and MS-COCO have recipes; the "
        "data are not part of the project, so its experiments use the bundled pictures. Experiments named planned/ are "
        "lists that `python -m benchmarks.experiments` runs and that have no results yet.",
    ]
    return "\n".join([*head, *(f"\n{section(paper)}" for paper in papers.values())]) + "\n"


def main() -> int:
    try:
        text = page()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE}: is out of date; run python tools/{Path(__file__).name}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
