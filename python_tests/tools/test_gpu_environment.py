"""The environment of benchmarks/gpu_check.sh: missing packages, and those from wheels."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import gpu_check
import gpu_environment
import pytest
from packaging.requirements import Requirement

import itm_fast
from python_tests.helpers.processes import run
from python_tests.tools.wheels import write_wheel


def distribution(folder: Path, name: str, version: str, *requires: str) -> None:
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    metadata.write_text("\n".join(lines) + "\n")


def test_missing_packages_are_named_with_those_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ("old_one>=3", "deep", "gone-a", 'bird[fast]; extra == "test"', 'unseen; extra == "docs"')
    distribution(tmp_path, "thing", "1.0", *wanted)
    distribution(tmp_path, "old_one", "2.5")
    distribution(tmp_path, "deep", "1.0", "gone-b", 'nowhere; sys_platform == "none"')
    distribution(tmp_path, "bird", "1.0", 'wing; extra == "fast"', 'song; extra == "loud"')
    monkeypatch.syspath_prepend(tmp_path)
    found = gpu_environment.missing("thing", "test")
    assert found == ["gone-a", "gone-b", "old-one >=3 (found 2.5)", "wing"]
    line = gpu_check.missing_line(found, Path("wheels"))
    assert line == (
        "missing Python packages: gone-a, gone-b, old-one >=3 (found 2.5), wing; fetch wheels for wheels on a "
        f"machine with a network: python tools/gpu_wheels.py --python {platform.python_version()} "
        f"--machine {platform.machine()} --out wheels gone-a gone-b old-one wing"
    )
    assert gpu_environment.missing("not-installed") == ["not-installed"]


def test_the_environment_has_the_interpreters_packages_and_those_of_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_environment, "ENVIRONMENT", tmp_path / "environment")
    write_wheel(tmp_path, "carried_along", "1.0", code="number = 42\n")
    interpreter = gpu_environment.prepare(tmp_path)
    code = "import carried_along, numpy, sys; print(carried_along.number, numpy.__version__, sys.prefix)"
    import numpy

    result = run([interpreter, "-c", code], cwd=tmp_path)
    assert result.stdout.split() == ["42", numpy.__version__, str(tmp_path / "environment")], result.stderr
    with pytest.raises(ImportError):
        __import__("carried_along")


def test_wheels_that_cannot_be_installed_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_environment, "ENVIRONMENT", tmp_path / "environment")
    name = write_wheel(tmp_path, "of_another", "1.0", tag="cp27-cp27m-win32").name
    with pytest.raises(SystemExit) as error:
        gpu_environment.prepare(tmp_path)
    assert str(error.value) == f"gpu_check: {tmp_path}: {name} is not a supported wheel on this platform."


def test_before_it_is_installed_the_sources_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    installed, absent = importlib.metadata.distribution, {"itm_fast"}

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name in absent:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    version, lines = gpu_environment.known("itm_fast")
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    before_version, before = gpu_environment.known("itm_fast")
    assert version == before_version == itm_fast.__version__
    assert {str(Requirement(line)) for line in before} == {str(Requirement(line)) for line in lines}
    assert (gpu_environment.missing(), gpu_environment.missing(extra="")) == ([], [])
    absent |= {"nltk", "hypothesis", "tensorboard"}
    assert gpu_environment.missing() == ["hypothesis", "nltk", "tensorboard"]
    assert gpu_environment.missing(extra="") == ["nltk"]
