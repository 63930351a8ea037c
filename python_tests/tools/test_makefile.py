"""The Makefile decides whether to use the interpreter's torch, and builds nothing without a compiler."""

import shutil
import subprocess
import sys

import pytest

from python_tests.helpers.processes import ROOT, run

MAKE = shutil.which("make")
LOGGING_PYTHON = """#!/bin/sh
if [ "$1" = -m ]; then echo "python $*"; else exec "{python}" "$@"; fi
"""


@pytest.fixture
def interpreter(tmp_path):
    """Return a function that makes an interpreter with a given version of torch; its `-m` commands are only printed."""

    def make(version):
        folder = tmp_path / "interpreter"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        [site_packages] = folder.glob("lib/python3*/site-packages")
        if version is not None:
            (site_packages / "torch" / "include").mkdir(parents=True)
            (site_packages / "torch" / "__init__.py").touch()
            metadata = site_packages / f"torch-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        logging = tmp_path / "python"
        logging.write_text(LOGGING_PYTHON.format(python=folder / "bin" / "python"))
        logging.chmod(0o755)
        return logging

    return make


def make(tmp_path, *arguments, **environment):
    (tmp_path / "venv").mkdir(exist_ok=True)
    unset = dict.fromkeys(("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "TORCH", "OLDEST"))
    environment = {**unset, "PYTHONUSERBASE": tmp_path / "no_user_site", **environment}
    return run([MAKE, f"VENV={tmp_path / 'venv'}", *arguments], cwd=ROOT, **environment)


@pytest.mark.parametrize(
    ("version", "shared"), [("2.13.0", True), ("2.11.0+cpu", True), ("2.10.1", False), (None, False)]
)
def test_the_environment_sees_only_a_torch_that_is_new_enough(interpreter, tmp_path, version, shared):
    environment = tmp_path / "venv"
    result = make(tmp_path, f"PYTHON3={interpreter(version)}", environment / "bin" / "python")
    assert result.returncode == 0, result.stderr
    made = f"python -m venv {environment}" + (" --system-site-packages" if shared else "")
    assert made in result.stdout.splitlines()


@pytest.mark.parametrize(("version", "installed"), [("2.13.0", False), ("2.10.1", True), (None, True)])
def test_torch_is_installed_where_none_is_new_enough(interpreter, tmp_path, version, installed):
    result = make(tmp_path, f"PYTHON={interpreter(version)}", "TORCH=torch==2.12.0", tmp_path / "venv" / ".set-up")
    assert result.returncode == 0, result.stderr
    commands = [line for line in result.stdout.splitlines() if line.startswith("python -m pip install")]
    assert any(line.endswith(" torch==2.12.0") for line in commands) == installed
    assert commands[-1].endswith(" --no-build-isolation -e .[dev]")
    assert (tmp_path / "venv" / ".set-up").exists()


@pytest.mark.parametrize(("version", "installed"), [("2.11.0+cpu", False), ("2.13.0", True), (None, True)])
def test_the_oldest_environment_takes_the_oldest_torch_alone(interpreter, tmp_path, version, installed):
    stamp = tmp_path / "venv" / ".set-up"
    result = make(tmp_path, "OLDEST=1", f"PYTHON={interpreter(version)}", stamp, TORCH="torch==2.12.0")
    assert result.returncode == 0, result.stderr
    commands = [line.split() for line in result.stdout.splitlines() if line.startswith("python -m pip install")]
    assert [line[-1] for line in commands if line[-1].startswith("torch")] == ["torch==2.11.0"] * installed


def test_without_a_compiler_a_build_says_so_in_one_line(tmp_path):
    stamp = tmp_path / "venv" / ".set-up"
    # cmake is missing too, so any attempt to run it fails.
    nothing = {"PATH": tmp_path / "empty", "CXX": "/nowhere/c++"}
    result = make(tmp_path, "-s", "-o", stamp, f"PYTHON={sys.executable}", "build", **nothing)
    assert (result.returncode, result.stderr) == (0, "")
    line = "itm_fast: no C++ compiler found (or Windows): installing pure Python, which runs on the packed reference\n"
    assert result.stdout == line
