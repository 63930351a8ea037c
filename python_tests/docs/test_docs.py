"""The documentation: generated parts are up to date, examples run, links resolve, public names are listed."""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import write_option_tables

import itm_fast.functional as F_itm
from benchmarks.experiments import __main__ as experiments
from benchmarks.experiments.tables import experiments_of
from itm_fast import losses
from itm_fast.cli.app import app
from itm_fast.losses import registry
from python_tests.helpers.processes import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
EXPERIMENTS = sorted((ROOT / "benchmarks" / "experiments").glob("*.yaml"))
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
PYTHON = {
    page: re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE) for page, text in TEXTS.items()
}
# The options of each command, without the hidden former names.
OPTIONS = {
    name: {"--help", *(o for p in command.params if not p.hidden for o in [*p.opts, *p.secondary_opts])}
    for name, command in write_option_tables.commands(typer.main.get_command(app), "itm-fast")
}
# Options of torchrun, the fuzzer and the experiments that pages mention, too.
OTHERS = {"--shutdown-timeout", "--nproc-per-node", "--only", "--run", "--results"}


def short(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("tool", [["-m", "benchmarks.render"], ["tools/write_option_tables.py"]], ids=" ".join)
def test_what_a_tool_renders_is_up_to_date(tool: list[str]) -> None:
    done = subprocess.run([sys.executable, *tool, "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if experiments_of(text)], ids=short)
def test_the_tables_of_a_page_are_up_to_date(page: Path) -> None:
    assert experiments.main(["page", str(page), "--check"]) == 0


def test_each_experiment_has_one_page() -> None:
    assert sorted(name for text in TEXTS.values() for name in experiments_of(text)) == sorted(
        path.stem for path in EXPERIMENTS
    )


@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON[page]], ids=short)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code blocks of a page run in order in one namespace; their assertions hold."""
    monkeypatch.chdir(tmp_path)
    # An example may register a loss.
    monkeypatch.setattr(registry, "_LOSSES", dict(registry._LOSSES))
    names: dict[str, object] = {"__name__": "page"}
    for block in PYTHON[page]:
        exec(compile(block, page.name, "exec", dont_inherit=True), names)


@pytest.mark.parametrize("name", F_itm.__all__)
def test_the_example_of_an_operator_runs(name: str) -> None:
    example = doctest.DocTestParser().get_doctest(getattr(F_itm, name).__doc__, {}, name, None, 0)
    assert len(example.examples) > 2
    printed: list[str] = []
    assert doctest.DocTestRunner().run(example, out=printed.append).failed == 0, "".join(printed)


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_the_commands_of_a_page_exist_with_their_options(page: Path) -> None:
    for block in re.findall(r"^```\w*\n(.*?)^```", TEXTS[page], flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            for call in re.findall(r"(?:itm-fast|-m itm_fast) ([a-z].*)", line):
                words = shlex.split(call, comments=True)
                name = next(name for name in OPTIONS if " ".join(["itm-fast", *words]).startswith(name))
                assert {word.partition("=")[0] for word in words if word.startswith("--")} <= OPTIONS[name], line
    if page.is_relative_to(DOCS):
        mentioned = set(re.findall(r"`(--[a-z][a-z-]*[a-z])[`= ]", TEXTS[page]))
        assert mentioned <= OTHERS.union(*OPTIONS.values())


def anchors(text: str) -> set[str]:
    """Return the heading anchors of a page, as Markdown renderers name them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_links_and_pictures_of_a_page_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#]*)(?:#([^)]*))?\)", TEXTS[page]):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(TEXTS[found]), f"{target}#{anchor}"


def test_pages_that_sources_name_exist() -> None:
    folders = ("itm_fast", "benchmarks", "tools", "csrc", "python_tests")
    sources = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".h", ".cpp")
    ]
    assert len(sources) > 300
    named = {(short(path), page) for path in sources for page in re.findall(r"docs/[\w/]+\.md", path.read_text())}
    assert {(source, page) for source, page in named if not (ROOT / page).exists()} == set()


def test_every_loss_and_operator_has_its_place_in_the_reference() -> None:
    table = re.findall(r"^\| `(\w+)\(?.*\|$", TEXTS[DOCS / "reference" / "losses.md"], flags=re.MULTILINE)
    assert {name for name in losses.__all__ if isinstance(getattr(losses, name), type)} <= set(table)
    operators = re.findall(
        r"^::: itm_fast\..*\.(\w+)$", TEXTS[DOCS / "reference" / "functional.md"], flags=re.MULTILINE
    )
    assert sorted(operators) == sorted(F_itm.__all__)
