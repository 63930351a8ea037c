"""Sources without libraries use the libraries of the installed package, or report why not; imports stay light."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import itm_fast
from python_tests.helpers.processes import BUILDS_CUDA, ROOT, run, run_python

WHERE = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, itm_fast, itm_fast.functional as F_itm
    from itm_fast.data import reader
    words = itm_fast.Fragments.from_padded(torch.ones(1, 2, 4))
    F_itm.cross_attention_scores(words, words)
info = itm_fast.build_info()
print(json.dumps({"file": itm_fast.__file__, "libraries": info["libraries"], "host": reader._host() is not None,
                  "warnings": [str(one.message) for one in caught]}))
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make a source folder without libraries, and a folder with the package as installed by pip."""
    sources, site = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "itm_fast", sources / "itm_fast", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(ROOT / "itm_fast", site / "itm_fast", ignore=shutil.ignore_patterns("__pycache__"))
    return sources, site


def found(sources: Path, site: Path, version: str) -> dict[str, object]:
    metadata = site / "itm_fast-0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: itm_fast\nVersion: {version}\n")
    answer: dict[str, object] = json.loads(run_python(WHERE, cwd=sources, PYTHONPATH=f"{sources}:{site}"))
    assert Path(str(answer["file"])).parent == sources / "itm_fast"
    return answer


def test_sources_use_the_libraries_of_the_installed_package(places: tuple[Path, Path]) -> None:
    sources, site = places
    answer = found(sources, site, itm_fast.__version__)
    libraries = answer["libraries"]
    assert isinstance(libraries, dict)
    assert (libraries["_C_cuda"] is not None) == BUILDS_CUDA
    assert {Path(path).parent for path in libraries.values() if path} == {site / "itm_fast"}
    assert (answer["host"], answer["warnings"]) == (True, [])


def test_libraries_of_another_version_are_named(places: tuple[Path, Path]) -> None:
    sources, site = places
    answer = found(sources, site, "0.0.7")
    (warning,) = answer["warnings"]  # type: ignore[misc]
    assert warning == (
        f"itm_fast runs on the packed reference: Python imported itm_fast {itm_fast.__version__} from the sources in "
        f"{sources}, which have no native libraries; those in {site / 'itm_fast'} are of version 0.0.7. Run Python in "
        "another folder, or build in place: pip install -e ."
    )


def test_importing_the_package_imports_no_compiler() -> None:
    code = """
import sys, torch, itm_fast
print("itm_fast.ops.library" in sys.modules)
for name in itm_fast.__all__:
    getattr(itm_fast, name)
from itm_fast import adapters, benchmarking, compat, distributed, report, serve
print("itm_fast.nn.micro_batches" in sys.modules, "torch._dynamo" in sys.modules)
"""
    assert run_python(code) == "True\nTrue False\n"


def test_the_version_is_printed_without_torch() -> None:
    code = "import sys; sys.argv[1:] = ['--version']; from itm_fast.__main__ import main; main()"
    code += "; print('torch' in sys.modules)"
    assert run_python(code) == f"itm-fast {itm_fast.__version__}\nFalse\n"
    done = run([sys.executable, "-m", "itm_fast", "--version"], cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"itm-fast {itm_fast.__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["search", "--help"], ["data", "import", "--help"]], ids=" ".join)
def test_help_is_printed_without_torch(arguments: list[str]) -> None:
    code = f"import sys; from itm_fast.cli import run; status = run({arguments!r})"
    code += "; print(status, {'torch', 'numpy', 'tqdm', 'PIL'} & sys.modules.keys())"
    assert run_python(code).endswith("\n0 set()\n")


def test_submodules_are_there_after_import_itm_fast() -> None:
    code = "import itm_fast; print(itm_fast.models.names()[0], itm_fast.losses.names()[0], 'training' in dir(itm_fast))"
    assert run_python(code) == "bfan bce True\n"
    with pytest.raises(AttributeError, match="module 'itm_fast' has no attribute 'model'"):
        itm_fast.model  # noqa: B018


def test_constants_of_graphs_are_marked_as_torch_marks_them() -> None:
    code = """
import torch
from itm_fast.ops.library import constant_in_graphs
def one(): return 1
def two(): return 1
print(vars(constant_in_graphs(one)) == vars(torch.compiler.assume_constant_result(two)) != {})
"""
    assert run_python(code) == "True\n"


def test_functions_stay_outside_graphs_as_torch_excludes_them() -> None:
    """Both decorators give the same graphs, results, breaks and errors; ours does not import the compiler."""
    code = """
import json, sys
import torch
from itm_fast.ops.library import outside_graphs
def triple(x):
    return x * 3
chosen = outside_graphs(triple)
chosen(torch.ones(2))
imported = "torch._dynamo" in sys.modules
import torch._dynamo.testing
from torch._dynamo.utils import counters
def behaviour(excluded):
    torch._dynamo.reset()
    counters.clear()
    graphs = torch._dynamo.testing.CompileCounter()
    outer = lambda x: excluded(x + 1) - 2
    values = torch.compile(outer, backend=graphs)(torch.ones(2)).tolist()
    try:
        torch.compile(outer, backend="eager", fullgraph=True)(torch.ones(2))
    except torch._dynamo.exc.Unsupported as error:
        refused = str(error).splitlines()[0]
    breaks = len(counters["graph_break"])
    return [values, graphs.frame_count, graphs.op_count, breaks, refused]
same = behaviour(chosen) == behaviour(torch.compiler.disable(triple))
print(json.dumps([imported, same, *behaviour(chosen)[:3]]))
"""
    assert json.loads(run_python(code)) == [False, True, [4.0, 4.0], 2, 2]
