"""tools/gpu_wheels.py: wheels for another interpreter and machine, with all dependencies, from an index on disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gpu_wheels
import pytest
from packaging.requirements import Requirement

from python_tests.helpers.processes import ROOT, run
from python_tests.tools.wheels import write_wheel

NEEDS = (
    "deeper>=2",
    "torch>=2.11",
    'never; python_version < "3.12"',
    'only-there; platform_machine == "aarch64"',
    'fast; extra == "quick"',
    'unseen; extra == "docs"',
)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Write an index: carried and its direct and indirect dependencies, in several versions and for several
    interpreters.
    """
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, "carried", "1.0", *NEEDS)
    for version in ("1.5", "2.0", "2.1"):
        write_wheel(folder, "deeper", version, "under_deeper[plain]", "carried")
    write_wheel(folder, "under_deeper", "1.0", 'fast>=1; extra == "plain"')
    for tag in ("cp311-cp311-manylinux_2_28_x86_64", "cp312-cp312-manylinux_2_28_x86_64", "cp312-cp312-win_amd64"):
        write_wheel(folder, "fast", "1.1", tag=tag)
    write_wheel(folder, "only_there", "3.0", tag="cp312-abi3-manylinux2014_aarch64")
    return folder


def fetched(index: Path, *arguments: object) -> Any:
    command = [sys.executable, ROOT / "tools/gpu_wheels.py", "--python", "3.12.3", *arguments]
    return run(command, cwd=index.parent, PIP_NO_INDEX="1", PIP_FIND_LINKS=index)


COMMON = {"carried-1.0-py3-none-any.whl", "deeper-2.1-py3-none-any.whl", "under_deeper-1.0-py3-none-any.whl"}
FAST = "fast-1.1-cp312-cp312-manylinux_2_28_x86_64.whl"


def test_what_a_package_needs_comes_along_once(index: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_wheel(out, "deeper", "1.5")  # From an earlier run: two versions would break the installation.
    write_wheel(out, "another", "1.0")
    result = fetched(index, "--machine", "x86_64", "--out", out, "carried[quick]")
    assert (result.returncode, result.stderr) == (0, "")
    assert {file.name for file in out.iterdir()} == {*COMMON, FAST, "another-1.0-py3-none-any.whl"}
    size = sum((out / name).stat().st_size for name in (*COMMON, FAST)) / 1e6
    assert result.stdout.startswith(f"4 wheels, {size:.1f} MB, in {out}: carried-1.0-py3-none-any.whl, ")


def test_another_machine_gets_its_own(index: Path, tmp_path: Path) -> None:
    (index / FAST).rename(index / FAST.replace("x86_64", "aarch64"))
    out = tmp_path / "out"
    result = fetched(index, "--machine", "aarch64", "--out", out, "carried")
    assert (result.returncode, result.stderr) == (0, "")
    names = {"only_there-3.0-cp312-abi3-manylinux2014_aarch64.whl", FAST.replace("x86_64", "aarch64")}
    assert {file.name for file in out.iterdir()} == COMMON | names


def test_a_package_without_a_wheel_is_one_line(index: Path, tmp_path: Path) -> None:
    result = fetched(index, "--machine", "x86_64", "--out", tmp_path / "out", "gone>=1")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "gpu_wheels: gone>=1: No matching distribution found for gone>=1\n"


def test_without_names_it_is_what_the_package_and_its_tests_need() -> None:
    names = {Requirement(line).name for line in gpu_wheels.everything()}
    assert {"torch", "nltk", "pytorch-ignite", "hypothesis", "pytest", "tensorboard"} <= names
    assert not names & {"itm_fast", "itm-fast", "mypy", "ruff"}
    skipped = gpu_wheels.there(gpu_wheels.environment("3.12", "x86_64"))
    assert {"torch", "sympy", "filelock"} <= skipped
    assert not skipped & {"nltk", "pytorch-ignite", "numpy", "pyyaml"}
