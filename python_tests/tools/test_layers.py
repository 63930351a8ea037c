"""The imports of the package: no cycles, only downward, and no private name of another folder."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from python_tests.helpers.processes import ROOT

# From top to bottom: a folder may import only the folders to its right.
ORDER = [
    "__main__", "__init__", "cli", "serve", "benchmarking", "adapters", "compat", "report", "training", "search",
    "evaluation",
    "models", "data", "distributed", "losses", "nn", "functional", "ops", "reference", "fragments", "config", "files",
    "version",
]  # fmt: skip

Import = tuple[str, str, str]


def imports(package: Path) -> list[Import]:
    """Return every import of the package's own modules: importing module, imported module, imported name."""
    files = {".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in package.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in files.items()}
    found = []
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package.name:
                assert not node.level
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found.append((module, whole if whole in modules else str(node.module), alias.name))
            elif isinstance(node, ast.Import):
                found += [(module, alias.name, "") for alias in node.names if alias.name.split(".")[0] == package.name]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{module} imports relatively"
    return found


def folder(module: str) -> str:
    _, _, rest = module.partition(".")
    return rest.split(".")[0] or "__init__"


@pytest.fixture(scope="module")
def found() -> list[Import]:
    return imports(ROOT / "itm_fast")


def test_the_design_draws_this_order() -> None:
    page = " ".join((ROOT / "docs/internals/design.md").read_text().split())
    assert f"Calls go one way: `{' -> '.join(ORDER[2:])}`" in page


def test_modules_import_each_other_in_no_circle(found: list[Import]) -> None:
    graph: dict[str, set[str]] = {}
    for module, imported, _ in found:
        if imported != module:
            graph.setdefault(module, set()).add(imported)
    TopologicalSorter(graph).prepare()


def test_folders_import_only_folders_below_them(found: list[Import]) -> None:
    upward = {
        (module, imported)
        for module, imported, _ in found
        if ORDER.index(folder(module)) > ORDER.index(folder(imported)) and folder(imported) != "__init__"
    }
    assert upward == set()


def test_no_private_name_is_imported_from_another_folder(found: list[Import]) -> None:
    private = {
        (module, imported, name)
        for module, imported, name in found
        if folder(module) != folder(imported) and name.startswith("_") and not name.startswith("__")
    }
    assert private == set()


def test_a_circle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "circular"
    package.mkdir()
    (package / "one.py").write_text("from circular import two\n")
    (package / "two.py").write_text("from circular.one import x\n")
    assert sorted(imports(package)) == [("circular.one", "circular.two", "two"), ("circular.two", "circular.one", "x")]
    with pytest.raises(ValueError, match="cycle"):
        test_modules_import_each_other_in_no_circle(imports(package))
