"""The build backend builds against an installed torch, and asks for a download only if none is installed."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import build_backend
import native_build
import pytest
import torch


@pytest.fixture(autouse=True)
def without_setuptools_own_answer(monkeypatch):
    """Replace setuptools' own answer, which would run setup.py."""
    for kind in ("wheel", "editable"):
        monkeypatch.setattr(build_backend.build_meta, f"get_requires_for_build_{kind}", lambda settings: ["setuptools"])


@pytest.fixture
def isolated(monkeypatch):
    """Imitate pip's build isolation: sys.path lacks site-packages, but sysconfig still names them."""
    hidden = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in hidden])


@pytest.fixture
def site_packages(tmp_path, monkeypatch):
    """Make an empty folder the only site-packages of the interpreter."""
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(native_build.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(native_build.site, "getusersitepackages", lambda: str(tmp_path))
    return tmp_path


def install_fake_torch(folder, version):
    (folder / "torch" / "include").mkdir(parents=True)
    metadata = folder / f"torch-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


@pytest.mark.usefixtures("isolated")
def test_the_installed_torch_is_found_under_isolation():
    folder, version = native_build.find_torch()
    assert folder == Path(torch.__file__).parent.resolve()
    assert version.split("+")[0] == torch.__version__.split("+")[0]


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_no_download_of_torch_where_one_is_installed(kind):
    requirements = getattr(build_backend, f"get_requires_for_build_{kind}")()
    assert requirements[0] == "setuptools"
    assert [name for name in requirements if name.startswith("torch")] == []


@pytest.mark.usefixtures("site_packages")
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_torch_is_asked_for_where_there_is_none(kind):
    assert "torch>=2.11" in getattr(build_backend, f"get_requires_for_build_{kind}")()


def test_an_old_torch_does_not_count(site_packages):
    install_fake_torch(site_packages, "2.10.1")
    assert native_build.find_torch() is None


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "3.0"])
def test_a_new_torch_counts(site_packages, version):
    install_fake_torch(site_packages, version)
    assert native_build.find_torch() == (site_packages / "torch", version)


def test_without_a_compiler_nothing_is_asked_for(site_packages, monkeypatch):
    monkeypatch.setenv("PATH", str(site_packages))
    monkeypatch.delenv("CXX", raising=False)
    assert native_build.find_compiler() is None
    assert build_backend._requirements_of_the_native_build() == []


def test_the_compiler_of_the_environment_counts_alone(monkeypatch):
    assert native_build.find_compiler() is not None
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert native_build.find_compiler() is None


def test_windows_has_no_native_build(monkeypatch):
    monkeypatch.setattr(native_build.platform, "system", lambda: "Windows")
    assert native_build.find_compiler() is None


def test_a_compiler_that_does_not_answer_is_none(tmp_path, monkeypatch):
    stub = tmp_path / "c++"
    stub.write_text("#!/bin/sh\nexit 1\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert native_build.find_compiler() is None


@pytest.mark.parametrize(("answer", "found"), [("cmake version 3.25.1", False), ("cmake version 3.26.0", True)])
def test_an_old_cmake_does_not_count(site_packages, monkeypatch, answer, found):
    tool = site_packages / "cmake"
    tool.write_text(f"#!/bin/sh\necho '{answer}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(site_packages))
    monkeypatch.setattr(build_backend, "find_compiler", lambda: "c++")
    assert native_build.find_tool("cmake") == (str(tool) if found else None)
    assert ("cmake>=3.26" in build_backend._requirements_of_the_native_build()) != found


def test_the_found_tools_answer():
    for name in ("cmake", "ninja"):
        assert subprocess.run([native_build.find_tool(name), "--version"], capture_output=True).returncode == 0
