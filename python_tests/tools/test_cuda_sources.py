"""The digest of the CUDA sources, and the architectures that a check must compile for."""

import json
import shutil
from pathlib import Path

import cuda_sources
import pytest

from python_tests.helpers.processes import ROOT


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy what nvcc compiles, and return the root."""
    for path in cuda_sources.sources():
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return tmp_path


def test_the_sources_are_those_that_nvcc_reads() -> None:
    names = {str(path.relative_to(ROOT / "csrc")) for path in cuda_sources.sources()}
    assert {"cuda/regulators.cu", "ops/regulators.h", "include/itm_fast/cuda/tile_product.h"} <= names
    assert {f"cuda/{path.name}" for path in (ROOT / "csrc/cuda").glob("*.cu")} <= names
    assert not any(name.startswith(("cpu/", "include/itm_fast/cpu/", "host/", "shim/")) for name in names)


def test_only_a_change_of_code_or_compiler_changes_the_digest(copy: Path) -> None:
    before = cuda_sources.digest("13.0", copy)
    assert before == cuda_sources.digest("13.0")
    assert before != cuda_sources.digest("13.1", copy)
    header = copy / "csrc/include/itm_fast/cuda/tile_product.h"
    text = header.read_text()
    header.write_text("// Another word.\n" + text.replace(" = ", "  =\t").replace("\n\n", "\n/* and\nmore */\n"))
    assert cuda_sources.digest("13.0", copy) == before
    header.write_text(text + "constexpr int kMore = 1;\n")
    assert cuda_sources.digest("13.0", copy) != before


def test_comment_marks_in_strings_are_code() -> None:
    assert cuda_sources.code('f("// a  b");  // gone\n\n g("\\"/*");\t') == 'f("// a b");\ng("\\"/*");'


def test_all_architectures_are_due_until_they_are_counted() -> None:
    assert cuda_sources.due(False, 7) == "8.0 8.6 8.9 9.0+PTX"
    assert [cuda_sources.due(True, commits) for commits in range(4)] == ["8.0+PTX", "8.6+PTX", "8.9+PTX", "9.0+PTX"]


def test_the_command_compares_with_the_committed_counts(tmp_path: Path, monkeypatch, capsys) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 99.7, V99.7.1'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    counts = tmp_path / "counts.json"
    monkeypatch.setattr(cuda_sources, "LOOP_COUNTS", counts)
    monkeypatch.setattr("sys.argv", ["cuda_sources"])
    counts.write_text(json.dumps({"sources": cuda_sources.digest("99.6")}))
    cuda_sources.main()
    counts.write_text(json.dumps({"sources": cuda_sources.digest("99.7")}))
    cuda_sources.main()
    every, one = capsys.readouterr().out.splitlines()
    assert (every, len(one.split())) == ("8.0 8.6 8.9 9.0+PTX", 1)
    nvcc.write_text("#!/bin/sh\necho nothing\n")
    with pytest.raises(SystemExit, match=r"^cuda_sources: nvcc --version does not name its release: nothing"):
        cuda_sources.main()
