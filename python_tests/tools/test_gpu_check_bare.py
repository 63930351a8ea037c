"""benchmarks/gpu_check.sh in an environment with torch, numpy and pytest alone, and where it finds the toolkit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tarfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import cuda_toolkit
import gpu_check
import gpu_environment
import gpu_suite
import pytest
import torch
from gpu_stage import by_tests
from packaging.requirements import Requirement

from benchmarks.gpu_table import check_is_of_a_gpu
from python_tests.helpers.processes import ROOT, run
from python_tests.tools.wheels import write_wheel

# pip installs the build and the wheels.
GIVEN = ("torch", "numpy", "pytest", "pip")


def closure(names: tuple[str, ...]) -> list[Distribution]:
    """Return the installed distributions of these packages and of all that they need without extras."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # A requirement of torch on other machines.
            continue
        needs = map(Requirement, found[name].requires or [])
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return list(found.values())


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a virtual environment that sees only `GIVEN` and their requirements; return its interpreter."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for one in closure(GIVEN):
        for top in {Path(file).parts[0] for file in one.files or []} - {"..", "__pycache__"}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(one.locate_file(top))).resolve())
    return folder / "bin" / "python"


@pytest.mark.thorough
def test_the_stages_run_dry_with_torch_numpy_and_pytest_alone(bare: Path, tmp_path: Path) -> None:
    """An import of another package by what the stages run or collect is an error here."""
    for absent in ("attrs", "hypothesis", "ignite", "nltk", "safetensors", "yaml"):
        assert run([bare, "-c", f"import {absent}"], cwd=tmp_path).returncode == 1
    environment = {"PYTHON3": bare, "ITM_FAST_GPU_CHECK_DEVICE": "cpu", "OMP_NUM_THREADS": 1, "PYTHONPATH": None}
    stages = (*gpu_check.STAGES, "suite")
    result = run([ROOT / "benchmarks/gpu_check.sh", *stages, "--out", tmp_path], cwd=ROOT, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    contents = {}
    for name in stages:
        content = json.loads((tmp_path / f"gpu_check_{name.replace('+', '_')}_dry_run.json").read_text())
        assert {"attrs", "hypothesis", "nltk", "pytorch-ignite"} <= set(content["missing_packages"])
        contents[name] = content
    outcomes = [contents[name]["outcome"].removeprefix("dry run, ") for name in stages]
    assert outcomes == ["passed", "passed", "passed", "unavailable", "unavailable"], result.stdout
    collected = next(step for step in contents["numbers"]["steps"] if step["name"] == "collected")
    assert re.search(r"^[1-9]\d+ tests collected", collected["detail"])
    left_out = contents["numbers"]["results"]["left_out"]
    assert left_out in result.stdout
    assert re.fullmatch(r"\d+ test files without GPU tests are left to the stage suite, and misses .*nltk.*", left_out)
    assert "tools/gpu_wheels.py" in contents["suite"]["steps"][-1]["detail"]
    # No step failed, but no sanitizer ran either.
    assert [step["outcome"] for step in contents["sanitize"]["steps"]] == ["passed", "unavailable", "unavailable"]
    measured = contents["bench"]["results"]
    assert measured["workloads"]["scores 4"]["variants"]["native"]["flop_per_s"] > 0
    for results in (contents["bench"], measured):
        with pytest.raises(ValueError, match=r"expected kind 'itm_fast GPU benchmark'|measured without a GPU"):
            check_is_of_a_gpu(results, "bench.json")
    archive = tmp_path / "gpu_check_dry_run.tar.gz"
    assert result.stdout.splitlines()[-1] == f"all results: {archive}"
    with tarfile.open(archive) as packed:
        names = set(packed.getnames())
    assert {f"gpu_check_dry_run/{file.name}" for file in tmp_path.glob("*.json")} <= names
    assert "gpu_check_dry_run/gpu_check_numbers_dry_run_collected.log" in names


def test_a_test_file_that_imports_a_missing_package_fails_the_stage(bare: Path, tmp_path: Path) -> None:
    planted = tmp_path / "test_planted.py"
    planted.write_text("import nltk\n\n\ndef test_nothing():\n    assert nltk\n")
    arguments = gpu_check.pytest("--collect-only", planted, gpu_suite.LAUNCHES)[1:]
    result = run([bare, *arguments], cwd=ROOT, PYTHONPATH=None)
    assert "ModuleNotFoundError: No module named 'nltk'" in result.stdout
    assert by_tests(result.returncode, result.stdout)[0] == "failed"


def test_only_the_files_of_the_stage_have_tests_for_a_gpu() -> None:
    """The decorators of helpers/devices.py and the mark are the only ways to a test for a GPU."""
    marked = re.compile(
        r"^(?:@each_(?:case|device)|@on_devices|@pytest\.mark\.cuda|pytestmark = pytest\.mark\.cuda)", re.M
    )
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "python_tests").rglob("test_*.py")}
    of_gpu = {file for file in files if marked.search((ROOT / file).read_text())}
    of_gpu |= {file for file in files if file.startswith("python_tests/cuda/")}
    assert of_gpu == set(gpu_suite.DEVICE_FILES)


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_nvcc_is_found_in_the_usual_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_HOME comes first, then CUDA_PATH, PATH, the toolkit of the machine, newer ones before older, and pip's."""
    monkeypatch.setattr(cuda_toolkit, "PREFIX", tmp_path / "local")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    folders = {name: tmp_path / name for name in ("home", "path", "bin")}
    monkeypatch.setenv("CUDA_HOME", str(folders["home"]))
    monkeypatch.setenv("CUDA_PATH", str(folders["path"]))
    monkeypatch.setenv("PATH", str(folders["bin"]))
    places = [folders["home"] / "bin", folders["path"] / "bin", folders["bin"]]
    places += [tmp_path / "local" / name / "bin" for name in ("cuda", "cuda-13.0", "cuda-12.8", "cuda-9.2")]
    places.append(tmp_path / "site/nvidia/cu13/bin")
    for place in places:
        program(place / "nvcc")
    for place in places:
        assert cuda_toolkit.find("nvcc") == str(place / "nvcc")
        (place / "nvcc").unlink()
    assert cuda_toolkit.put_on_path() is None
    last = program(places[-1] / "nvcc")
    assert cuda_toolkit.put_on_path() == str(last)
    assert cuda_toolkit.os.environ["PATH"].split(":") == [str(last.parent), str(folders["bin"])]


def test_without_nvcc_one_line_says_where_it_was_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_toolkit, "folders", lambda: [tmp_path])
    with pytest.raises(SystemExit) as error:
        gpu_environment.check_device(tmp_path)
    assert str(error.value) == (
        "gpu_check: no nvcc in CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda*/bin and nvidia/cu13/bin of the Python "
        "packages; set CUDA_HOME to the folder of the CUDA toolkit"
    )
    program(tmp_path / "nvcc")
    monkeypatch.setattr(gpu_environment.native_build, "find_tool", lambda name: None)
    monkeypatch.setattr(gpu_environment, "BUILD_PACKAGES", ("pytest", "gone"))
    write_wheel(tmp_path, "cmake", "4.0")
    with pytest.raises(SystemExit) as error:
        gpu_environment.check_device(tmp_path)
    assert str(error.value) == (
        f"gpu_check: the build needs ninja, gone; install them for {sys.executable}, or carry their wheels"
    )
    write_wheel(tmp_path, "ninja", "1.12")
    write_wheel(tmp_path, "gone", "1.0")
    gpu_environment.check_device(tmp_path)
